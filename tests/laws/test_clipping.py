"""`clip_norm`: a step's gradient is clipped as torch's `clip_grad_norm_` clips the joined batch's.

`test_combinations` compares each layout, precision and family with plain torch; here are the other options and worlds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.catalogue import HELPED, ROWS, SERVED, Row, label
from laws.combination_runs import points
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import permutation
from some_cases import some_of

SAMPLES, STEPS, BOUND = 71, 6, 0.1
"""Epochs of two batches of 28 samples and one of 15. Every gradient of these steps is longer than the bound."""


JOB = pt.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(),
    data=lambda folder: pt.Data(points(SAMPLES, 0, torch.float64), points(16, 1, torch.float64)),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, momentum=0.9, weight_decay=0.02),
    lr=0.05,
)


def weights_of(batch: Any) -> Tensor:
    return 1.0 + 3.0 * (batch[0][:, 0] > 0).double()


def weighted_loss(model: nn.Module, batch: Any) -> Tensor:
    weights = weights_of(batch)
    return (weights * ((model(batch[0]) - batch[1]) ** 2).mean(1)).sum() / weights.sum()


WEIGHTED = replace(JOB, loss=pt.of_batch(weighted_loss), weight=lambda batch: weights_of(batch).sum())


def plain(job: pt.Job) -> float:
    """The test loss of plain torch with the joined batches."""
    torch.manual_seed(0)
    net = job.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.02)
    x, y = points(SAMPLES, 0, torch.float64).tensors
    for step in range(STEPS):
        chosen = permutation(SAMPLES, 0, step // 3)[step % 3 * 28 :][:28]
        optimizer.zero_grad()
        batch = x[chosen], y[chosen]
        loss = nn.functional.mse_loss(net(batch[0]), batch[1]) if job.weight is None else weighted_loss(net, batch)
        loss.backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), BOUND) > BOUND
        optimizer.step()
    x, y = points(16, 1, torch.float64).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(net(x), y) if job.weight is None else weighted_loss(net, (x, y)))


def simulated(strategy: Any, workers: int, job: pt.Job = JOB, **options: Any) -> pt.Result:
    given = {"global_batch_size": 28, "steps": STEPS, "threads": 1, "clip_norm": BOUND}
    return pt.simulate(job, strategy, workers, **(given | options))


def refusal(row: Row) -> str | None:
    """The code of strategies without a step's gradient on one worker."""
    found = row.make()
    if found.schedule is not None:
        return None if str(found).startswith(("gpipe", "one_f_one_b", "interleaved", "zero_bubble")) else "PT1535"
    if found.server is None:
        return None
    return "PT1537" if row in HELPED else "PT1538" if found.server.rule.waits_for_several else None


@pytest.mark.parametrize("row", some_of([*ROWS, *SERVED, *HELPED], 0, of=2), ids=label)
def test_a_bound_that_no_gradient_reaches_changes_no_bit(row: Row) -> None:
    workers, options = max(4, row.make().holders), {"global_batch_size": None, "batch_size": 7}
    if (code := refusal(row)) is not None:
        with pytest.raises(Incompatible, match=code):
            simulated(row.make(), workers, **options)
        return
    free, bound = (simulated(row.make(), workers, **options, clip_norm=c) for c in (None, 1e9))
    assert (bound.parameters_sha256, bound.loss) == (free.parameters_sha256, free.loss)
    tight = simulated(row.make(), workers, **options, clip_norm=0.01)
    assert tight.parameters_sha256 != free.parameters_sha256, "and one that gradients reach does"


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("job", [JOB, WEIGHTED], ids=["samples", "weights"])
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("sync_sgd()", 1), ("sync_sgd(route=ring)", 3), ("shared_memory()", 2), ('hybrid("0")', 3)],
)
def test_workers_clip_the_joined_batch_as_torch_does(strategy: str, workers: int, job: pt.Job, accumulate: int) -> None:
    assert simulated(strategy, workers, job, accumulate=accumulate).loss == pytest.approx(plain(job), rel=1e-12)


@pytest.mark.parametrize("strategy", ["async_sgd()", "ssp(bound=0)", "easgd(period=1)", "downpour(optimizer=sgd)"])
def test_one_worker_of_a_server_clips_before_its_push(strategy: str) -> None:
    job = replace(JOB, optimizer=torch.optim.SGD)
    free = simulated("sync_sgd()", 1, job)
    options: dict[str, Any] = {"global_batch_size": None, "batch_size": 28}
    found = simulated(strategy, 1, job, **options)
    if "easgd" not in strategy:  # whose server has the mean of old and new
        assert found.loss == pytest.approx(free.loss, rel=1e-12)
    assert found.loss != simulated(strategy, 1, job, **options, clip_norm=None).loss


@pytest.mark.parametrize(
    ("strategy", "options", "code"),
    [
        ("sync_sgd()", {"batched": True}, "PT1325"),
        ("pipedream(stages=2)", {}, "PT1535"),
        ("gpipe(stages=2, inner=async_sgd())", {}, "PT1536"),
        ("flexrr()", {}, "PT1537"),
        ("backup_workers(backups=1)", {}, "PT1538"),
        ("softsync(n=2)", {}, "PT1538"),
        ("staleness_aware(n=2)", {}, "PT1538"),
    ],
)
def test_refusals(strategy: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(Incompatible, match=code):
        pt.simulate(JOB, strategy, 2, clip_norm=BOUND, steps=1, **options)


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), "much"])
def test_a_bound_is_positive(bound: Any) -> None:
    with pytest.raises(ValueError, match="clip_norm"):
        pt.simulate(JOB, "sync_sgd()", 2, clip_norm=bound)


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("sync_sgd()", {}),
        ("sync_sgd()", {"min_workers": 1}),
        ("shared_memory()", {}),
        ("local_sgd(period=3)", {}),
        ('hybrid("0, 2")', {}),
        ("gpipe(stages=2)", {}),
    ],
    ids=str,
)
def test_processes(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The simulated model, also where a run is broken off within an epoch and resumed."""
    given: dict[str, Any] = {
        "threads": 1,
        "clip_norm": BOUND,
        "global_batch_size": 28,
        "accumulate": 1,
        "out": tmp_path,
    }
    pt.run(JOB, strategy, 2, steps=4, **given, **options)
    found = pt.run(JOB, strategy, 2, steps=STEPS, resume=True, **given, **options)
    assert found.loss == pytest.approx(simulated(strategy, 2).loss, rel=1e-12)


@pytest.mark.process
@pytest.mark.parametrize("precision", ["bf16", "fp16(loss_scale=1024)"])
def test_a_loss_scale_is_taken_off_first(precision: str) -> None:
    """The masters' gradients are clipped: the same in both worlds, and with another scale of losses."""
    job = replace(JOB, model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), data=points32)
    given: dict[str, Any] = {"steps": STEPS, "threads": 1, "clip_norm": BOUND, "precision": precision}
    found = pt.run(job, "sync_sgd()", 2, **given)
    assert found.loss == pytest.approx(pt.simulate(job, "sync_sgd()", 2, **given).loss, rel=1e-6)
    free = pt.simulate(job, "sync_sgd()", 2, **{**given, "precision": None}).loss
    assert found.loss == pytest.approx(free, rel=0.02)


def points32(folder: Path | None) -> pt.Data:
    return pt.Data(points(SAMPLES, 0, torch.float32), points(16, 1, torch.float32))


def test_sparse_gradients_are_clipped() -> None:
    """A table with gradients by rows ends as the dense one, to 1e-12."""

    def table(sparse: bool) -> pt.Job:
        return pt.Job(
            model=lambda: nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 2)).double(),
            data=lambda folder: pt.Data(torch.utils.data.TensorDataset(rows, targets)),
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD),
            lr=0.5,
        )

    random = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 9, (40, 2), generator=random)
    targets = 3 * torch.randn(40, 2, generator=random, dtype=torch.float64)
    ends = [
        pt.simulate(table(sparse), "sync_sgd()", workers, steps=5, clip_norm=bound).train_loss
        for sparse in (False, True)
        for workers in (1, 2)
        for bound in (BOUND, 1e6)
    ]
    assert ends[4:] == pytest.approx(ends[:4], rel=1e-12)
    assert ends[0] != pytest.approx(ends[1], rel=1e-3)
