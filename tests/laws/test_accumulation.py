"""Gradient accumulation: a step in micro-batches is the step of the whole batch, for every strategy of the catalogue.

batch of a worker     0 1 2 3 4 5 6           accumulate=4:  0 1 | 2 3 | 4 5 | 6
gradient              g                       2/7 g₀ + 2/7 g₁ + 2/7 g₂ + 1/7 g₃, exchanged behind the last pass
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import ROWS, Row
from laws.combination_runs import points
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import own_picks
from polytempo.data.shard import DataShard
from polytempo.spec.run_options import OptionKeywords
from some_cases import some_of

SAMPLES, STEPS = 71, 6
"""Epochs of two batches of 28 samples and one of 15, which workers and micro-batches share unevenly."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


JOB = pt.Job(
    model=model,
    data=lambda folder: pt.Data(points(SAMPLES, 0, torch.float64), points(16, 1, torch.float64)),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, momentum=0.9, weight_decay=0.02),
    lr=0.05,
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4),
)


def refusal(row: Row) -> str | None:
    """The code of strategies that cut batches themselves."""
    features = row.make().features
    return next((code for name, code in REFUSED.items() if name in features), None)


REFUSED = {"stages": "PT1526", "slices": "PT1527", "helping": "PT1528"}


def simulated(row: Row, workers: int, accumulate: int, **options: Any) -> pt.Result:
    return pt.simulate(
        *(JOB, row.make(), workers), batch_size=28 // workers, steps=STEPS, threads=1, accumulate=accumulate, **options
    )


@pytest.mark.parametrize("row", some_of(ROWS, 0, of=3), ids=lambda row: str(row.make()))
def test_micro_batches_train_as_their_batch(row: Row) -> None:
    workers = max(4, row.make().holders)
    if (code := refusal(row)) is not None:
        with pytest.raises(Incompatible, match=code):
            simulated(row, workers, 4)
        return
    whole, cut = simulated(row, workers, 1), simulated(row, workers, 4)
    assert (cut.loss, cut.train_loss) == pytest.approx((whole.loss, whole.train_loss), rel=1e-12)
    assert (cut.steps, cut.samples, cut.bytes_sent_per_rank) == (whole.steps, whole.samples, whole.bytes_sent_per_rank)


@pytest.mark.parametrize(
    ("batches", "rank", "cuts", "expected"),
    [
        ([8, 8], 1, 2, [(4, 6, 2, 1), (6, 8, 2, 0), (12, 14, 2, 1), (14, 16, 2, 0)]),
        ([7], 0, 3, [(0, 2, 2, 2), (2, 3, 1, 1), (3, 4, 1, 0)]),
        ([5], 0, 3, [(0, 2, 2, 1), (2, 3, 1, 0)]),  # rank 1 has two samples, so both make two passes
        ([5], 1, 3, [(3, 4, 1, 1), (4, 5, 1, 0)]),
        ([1], 1, 3, [(0, 1, 0, 0)]),  # a stand-in for rank 0's sample
    ],
)
def test_parts_of_two_ranks_in_micro_batches(
    batches: list[int], rank: int, cuts: int, expected: list[tuple[int, ...]]
) -> None:
    """Begin, end, samples that count, and micro-batches that follow."""
    found = own_picks(0, batches, 2, [rank], cuts)
    assert [(each.start, each.stop, each.local_samples, each.following) for each in found] == expected


@pytest.mark.parametrize("left_at", [0, 3, 4])
def test_a_position_is_between_batches(left_at: int) -> None:
    """A loop that ends within a batch goes on behind that batch, as with worker processes of a loader."""
    data = TensorDataset(torch.arange(12))
    shard = DataShard(data, rank=1, size=2, batch_size=3, shuffle=False, micro_batches=3)
    batches = iter(shard)
    seen = [int(next(batches)[0]) for _ in range(left_at)]
    other = shard.at(rank=1, size=2)
    rest = [int(one) for [one] in other]
    assert seen + rest == {0: [3, 4, 5, 9, 10, 11], 3: [3, 4, 5, 9, 10, 11], 4: [3, 4, 5, 9]}[left_at]


@pytest.mark.parametrize("factor", [1, 1000], ids=["slow network", "fast network"])
def test_the_clock_hides_exchanges_behind_the_last_pass_alone(factor: int) -> None:
    """Three equal buckets on two workers: an exchange takes x seconds, a backward pass b. After 2/5 of it the first
    exchange begins, after 4/5 the second, because the first layer has no gradient of inputs."""
    gbit, flops = 1.0 * factor, 1e9
    job = replace(JOB, model=lambda: nn.Sequential(*(nn.Linear(2600, 2600, bias=False) for _ in range(3))), data=wide)
    spent = {
        (strategy, k): pt.simulate(
            *(job, strategy, 2, pt.cluster.ethernet(gbit_per_s=gbit, latency_us=0, gflops=flops / 1e9)),
            batch_size=8,
            steps=1,
            accumulate=k,
            meta=True,
        ).seconds
        for strategy in ("sync_sgd()", "local_sgd(period=2)")
        for k in (1, 4)
    }
    computed_s = spent["local_sgd(period=2)", 1]
    assert spent["local_sgd(period=2)", 4] == pytest.approx(computed_s, rel=1e-12)
    exchange_s = 2600 * 2600 * 4 * 8 / (gbit * 1e9)
    backward_s = 8 * 16 * 2600 * 2600 / flops * 2 / 3
    for k in (1, 4):
        b, x = backward_s / k, exchange_s
        exposed_s = max(3 * x - 0.6 * b, 2 * x - 0.2 * b, x)
        assert spent["sync_sgd()", k] == pytest.approx(computed_s + exposed_s, rel=1e-6)


def wide(folder: object) -> pt.Data:
    return pt.Data(TensorDataset(torch.zeros(16, 2600), torch.zeros(16, 2600)))


@pytest.mark.parametrize(
    ("strategy", "options", "code"),
    [
        ("sync_sgd()", {"batch_size": 3}, "PT1530"),
        ("sync_sgd()", {"global_batch_size": 6}, "PT1530"),
        ("sync_sgd()", {"batched": True}, "PT1323"),
        ("downpour()", {"noise_scale": 2}, "PT1529"),
    ],
)
def test_refusals(strategy: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(Incompatible, match=code):
        pt.simulate(JOB, strategy, 2, accumulate=4, steps=1, **options)


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["sync_sgd()", "shared_memory()", "local_sgd(period=3)", 'hybrid("0, 2")'])
def test_processes(strategy: str, tmp_path: Path) -> None:
    """The model of whole batches, also where a run is broken off within an epoch and resumed."""
    given: OptionKeywords = {"batch_size": 14, "threads": 1}
    whole = pt.run(JOB, strategy, 2, steps=STEPS, **given)
    pt.run(JOB, strategy, 2, steps=4, accumulate=4, out=tmp_path, **given)
    cut = pt.run(JOB, strategy, 2, steps=STEPS, accumulate=4, out=tmp_path, resume=True, **given)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)


@pytest.mark.process
def test_an_elastic_run() -> None:
    """Three workers have other micro-batches than the same run's two, and the same batches."""
    whole = pt.simulate(JOB, "sync_sgd()", 2, steps=STEPS, batch_size=14, threads=1)
    cut = pt.run(JOB, "sync_sgd()", 2, steps=STEPS, batch_size=14, accumulate=4, min_workers=1, threads=1)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
