"""The mean per token: batches of unequally long texts train as their joined batch, for any workers and micro-batches.

gradient of a step     Σ wᵢ gᵢ / Σ wᵢ       i: micro-batches of all workers; wᵢ: the tokens that count
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polytempo as pt
from laws.catalogue import ROWS, Row
from polytempo import strategies as s
from polytempo.collectives import ring
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import permutation
from polytempo.worlds import ProcessWorld
from process.crew import together
from some_cases import some_of

WORDS, BATCH, STEPS = 9, 12, 6
LENGTHS = [1 + (7 * i) % 11 for i in range(31)]
"""Texts of 1 to 11 words: two batches of 12 texts an epoch, and one of 7."""


def texts() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(1, WORDS, (length + 1,), generator=drawn) for length in LENGTHS]


def padded(samples: list[Tensor], width: int = 0) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([*samples, torch.zeros(width, dtype=torch.int64)], batch_first=True)[:-1]
    return {"ids": ids[:, :-1], "next": ids[:, 1:], "mask": ids[:, 1:] != 0}


def tokens(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 5), nn.Tanh(), nn.Linear(5, WORDS)).double()


def mean_of_tokens(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """NaN for a batch without tokens, as torch's cross-entropy."""
    return nn.functional.cross_entropy(net(batch["ids"])[batch["mask"]], batch["next"][batch["mask"]])


def halving(optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


JOB = pt.Job(
    model=model,
    data=lambda folder: pt.Data(texts(), texts()[:9], padded),  # type: ignore[arg-type]  # a list is a data set
    loss=pt.of_batch(mean_of_tokens),
    optimizer=partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    lr=0.3,
    schedule=halving,
    weight=tokens,
)


def plain(job: pt.Job = JOB, steps: int = STEPS) -> dict[str, Tensor]:
    """Plain torch on the joined batches."""
    torch.manual_seed(0)
    net, data = job.model(), list(job.data(None).train)
    optimizer = job.optimizer(net.parameters(), job.lr)
    schedule = halving(optimizer, 3)
    for step in range(steps):
        order = permutation(len(data), 0, step // 3).tolist()[step % 3 * BATCH : (step % 3 + 1) * BATCH]
        batch = padded([data[i] for i in order])
        optimizer.zero_grad()
        if batch["mask"].any():
            mean_of_tokens(net, batch).backward()
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def simulated(job: pt.Job, strategy: Any, workers: int, folder: Path, **options: Any) -> dict[str, Tensor]:
    given = {"global_batch_size": BATCH, "steps": STEPS, "threads": 1, "checkpoint_every": STEPS, "out": folder}
    pt.simulate(job, strategy, workers, **given | options)
    found: dict[str, Tensor] = pt.training.checkpoint_model(folder)
    return found


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("row", [row for row in ROWS if row.joined], ids=lambda row: str(row.make()))
def test_strategies_that_average(row: Any, workers: int, accumulate: int, tmp_path: Path) -> None:
    check(simulated(JOB, row.make(), workers, tmp_path, accumulate=accumulate), plain())


PAIRS = replace(
    JOB,
    data=lambda folder: pt.Data(texts(), texts()[:9], pairs),  # type: ignore[arg-type]  # a list is a data set
    loss=lambda output, target: nn.functional.cross_entropy(output[target != 0], target[target != 0]),
    weight=lambda batch: (batch[1] != 0).sum(),
)
"""The same training, with batches of inputs and targets."""


def pairs(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    batch = padded(samples, width=12)  # `hybrid` takes batches of equal shapes
    return batch["ids"], batch["next"]


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("sync_sgd(route=invariant(slices=6))", 3),
        ("shared_memory()", 2),
        ("gpipe(2, 3)", 2),
        ("one_f_one_b(2, 2)", 4),
        (s.split({"2": "row"}, parts=2), 2),
        ("backup_workers(backups=0)", 1),
        ("backup_workers(backups=0)", 2),
        ("backup_workers(backups=0)", 3),
    ],
)
def test_other_layouts(strategy: Any, workers: int, tmp_path: Path) -> None:
    """Slices, one copy, stages with replicas, layers in parts, and a server that waits for all workers."""
    given: dict[str, Any] = (
        {} if "backup" not in str(strategy) else {"batch_size": BATCH // workers, "global_batch_size": None}
    )
    check(simulated(PAIRS, strategy, workers, tmp_path, **given), plain())


def test_workers_that_weigh_nothing(tmp_path: Path) -> None:
    """Most texts have no word that counts, so some workers have none in a step, and in some steps all have none. Their
    losses would be NaN, and are not computed."""
    few = [text if i % 9 == 0 else torch.tensor([1, 0]) for i, text in enumerate(texts())]
    job = replace(JOB, data=lambda folder: pt.Data(few, None, padded))  # type: ignore[arg-type]  # a list is a data set
    assert not padded([few[i] for i in permutation(31, 0, 0)[:4]])["mask"].any()
    for accumulate in (1, 2):
        check(simulated(job, "sync_sgd()", 3, tmp_path / str(accumulate), accumulate=accumulate), plain(job))


@pytest.mark.parametrize("row", some_of([row for row in ROWS if not row.joined], 0), ids=lambda row: str(row.make()))
def test_strategies_with_other_rules(row: Row) -> None:
    """A worker's gradient is its own mean per token; the strategy then treats it as one of equal batches."""
    strategy = row.make()
    given: dict[str, Any] = {"batch_size": BATCH // 4, "steps": STEPS, "threads": 1}
    if code := next((code for name, code in REFUSED.items() if name in strategy.features), None):
        with pytest.raises(Incompatible, match=code):
            pt.simulate(PAIRS, strategy, 4, **given, accumulate=3)
        return
    whole, cut = (pt.simulate(PAIRS, strategy, 4, **given, accumulate=k) for k in (1, 3))
    assert (cut.loss, cut.train_loss) == pytest.approx((whole.loss, whole.train_loss), rel=1e-12)


REFUSED = {"stages": "PT15(26|34)", "slices": "PT1527", "helping": "PT15(28|31)"}


def test_steps_without_exchange_exchange_no_weight() -> None:
    """Bytes a worker sends for weights: 8, at the steps of its gradients."""

    def sent(strategy: str, job: pt.Job) -> float:
        given: dict[str, Any] = {"global_batch_size": BATCH, "steps": STEPS, "threads": 1}
        return pt.simulate(job, strategy, 2, **given).bytes_sent_per_rank

    by_samples = replace(JOB, weight=None)
    for strategy, steps in (("sync_sgd()", 6), ("post_local_sgd(2, period=2)", 2), ("local_sgd(period=2)", 0)):
        assert sent(strategy, JOB) - sent(strategy, by_samples) == 8 * steps


@pytest.mark.parametrize(
    ("weight", "shown"),
    [
        (lambda batch: math.nan, "nan"),
        (lambda batch: -2, "-2"),
        (lambda batch: torch.tensor(math.inf), "inf"),
        (lambda batch: batch["mask"], r"shape \(6, "),
        (lambda batch: "three", "'three'"),
    ],
)
def test_weights_that_are_none(weight: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"job job: weight\(batch\) returned .*{shown}.*; expected a number from 0"):
        pt.simulate(replace(JOB, weight=weight), "sync_sgd()", 2, global_batch_size=BATCH, steps=1)


def test_refusals() -> None:
    half = replace(PAIRS, weight=lambda batch: (batch[1] != 0).sum() + 0.5)
    with pytest.raises(Incompatible, match=r"PT1532: .*job is [0-9]+\.5, "):
        pt.simulate(half, "backup_workers(backups=0)", 2, batch_size=4, steps=1)
    with pytest.raises(Incompatible, match="PT1533"):
        pt.simulate(PAIRS, "downpour()", 2, noise_scale=1, steps=1)
    with pytest.raises(Incompatible, match="PT1324"):
        pt.simulate(JOB, "sync_sgd()", 2, batched=True, steps=1)
    with pytest.raises(ValueError, match="weight is 3; expected a function, called as weight"):
        replace(JOB, weight=3)  # type: ignore[arg-type]  # the test is about it


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("sync_sgd()", 3, {"accumulate": 4}),
        ("sync_sgd()", 2, {"min_workers": 1}),
        ("shared_memory()", 2, {"accumulate": 2}),
        ("gpipe(2, 3)", 2, {}),
        ('hybrid("2")', 2, {"accumulate": 2}),
    ],
)
def test_jobs_on_processes(strategy: str, workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"global_batch_size": BATCH, "threads": 1, "out": tmp_path, **options}
    pt.run(PAIRS, strategy, workers, steps=4, **given)
    pt.run(PAIRS, strategy, workers, steps=STEPS, resume=True, **given)
    check(pt.training.checkpoint_model(tmp_path), plain())


# ------------------------------------------------------------------ loops of a user


def loop(world: ProcessWorld, strategy: Strategy, accumulate: int, texts_of_it: list[Tensor]) -> dict[str, Tensor]:
    """Two epochs of steps of 24 texts, dealt in micro-batches: every rank clips the mean gradient of a step."""
    torch.manual_seed(0)
    net = model()
    optimizer = JOB.optimizer(net.parameters(), JOB.lr)
    handle = pt.attach(net, optimizer, strategy)
    loader = DataLoader(texts_of_it, 24 // accumulate // world.size, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]  # a list is a data set
    schedule = halving(optimizer, 3)
    batches = pt.shard(loader, weight=tokens)
    for _ in range(2):
        for number, batch in enumerate(batches, start=1):
            with handle.no_sync() if number % accumulate else nullcontext():
                mean_of_tokens(net, batch).backward()
            if number % accumulate == 0:
                handle.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    with handle.consensus():
        found = {name: p.detach().clone() for name, p in net.named_parameters()}
    handle.detach()
    return found


CLIP = 0.1
EVEN = [*texts()[:24], *texts()[:24]]
"""Two steps of 24 texts an epoch, so a loop's micro-batches are parts of a step."""


def plain_loop(data: list[Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = model()
    optimizer = JOB.optimizer(net.parameters(), JOB.lr)
    schedule = halving(optimizer, 3)
    for epoch in range(2):
        order = permutation(len(data), 0, epoch).tolist()
        for begin in range(0, len(data), 24):
            optimizer.zero_grad()
            mean_of_tokens(net, padded([data[i] for i in order[begin : begin + 24]])).backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            schedule.step()
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.sync_sgd(route=ring), s.shared_memory()], ids=str)
def test_loops_of_a_user(strategy: Strategy, workers: int) -> None:
    """Some micro-batches of some workers have no tokens that count, so their loss is NaN."""
    few = [torch.tensor([1, 0]) if 3 * i % 4 == 2 else text for i, text in enumerate(EVEN)]

    def work(world: ProcessWorld) -> list[dict[str, Any]]:
        found = [loop(world, strategy, k, data) for k, data in ((1, EVEN), (4, EVEN), (4, few))]
        return [{name: tensor.tolist() for name, tensor in each.items()} for each in found]

    expected = [plain_loop(data) for data in (EVEN, EVEN, few)]
    for found, wanted in zip(together(workers, work, timeout_s=100)[0], expected, strict=True):
        check({name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}, wanted)


@pytest.mark.process
def test_a_loop_of_local_steps_has_the_mean_of_its_own_tokens() -> None:
    """Micro-batches of a rank count by their tokens; ranks that exchange parameters count alike."""

    def work(world: ProcessWorld) -> list[dict[str, Any]]:
        found = [loop(world, s.local_sgd(period=2), k, EVEN) for k in (1, 4)]
        return [{name: tensor.tolist() for name, tensor in each.items()} for each in found]

    whole, cut = together(1, work, timeout_s=100)[0]
    check(*({name: torch.tensor(v, dtype=torch.float64) for name, v in each.items()} for each in (cut, whole)))


@pytest.mark.process
def test_refusals_in_loops() -> None:
    def work(world: ProcessWorld) -> list[str]:
        net = model()
        optimizer = JOB.optimizer(net.parameters(), 0.1)
        handle = pt.attach(net, optimizer, s.sync_sgd())
        said, batches = [], iter(pt.shard(DataLoader(EVEN, 2, collate_fn=padded), weight=tokens))  # type: ignore[arg-type]  # a list is a data set
        first, second = next(batches), next(batches)
        with pytest.raises(Incompatible) as refused, handle.join():
            raise AssertionError("join has begun")
        said.append(refused.value.code)
        mean_of_tokens(net, first).backward()
        with pytest.raises(RuntimeError, match="of 2 batches of a step would be exchanged in several parts"):
            mean_of_tokens(net, second).backward()
        for weight in (-1.0, math.nan):
            with pytest.raises(ValueError, match=rf"weight\(batch\) returned {weight:g}"):
                next(iter(pt.shard(EVEN, batch_size=1, weight=lambda batch, weight=weight: weight)))  # type: ignore[arg-type]  # a list is a data set
        return said

    assert together(2, work, timeout_s=100) == [["PT1113"], ["PT1113"]]
