"""Laws of workers in step: one model for a group of them computes the same as each alone."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_batched import SMALL, WithUnused, adam, falling, groups, made
from polytempo import strategies as s
from polytempo.aggregation import mean
from polytempo.cluster import Cluster
from polytempo.core import NotFinite, Strategy, chain
from polytempo.data.plan import alike, global_batches, slices
from polytempo.data.shard import DataShard
from polytempo.runs.simulated.in_step import groups_in_step
from polytempo.spec.job import Job
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

EVEN = pt.cluster.ethernet(gflops=0.2)


class TwoDtypes(nn.Module):
    """Two dtypes make two buckets; the first is exchanged while the second is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 6).double(), nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(inputs)).float())
        return found


def trained(job: Job, workers: int, *, batched: bool, **options: Any) -> tuple[Any, Tensor, int]:
    """The result, rank 0's parameters, and how many models were made."""
    seen: list[nn.Module] = []

    def model() -> nn.Module:
        made = job.model()
        seen.append(made)
        return made

    given: dict[str, Any] = {"steps": 9, "batch_size": 3} | options
    result = pt.simulate(replace(job, model=model), s.sync_sgd(), workers, EVEN, batched=batched, **given)
    first = seen[1]  # the one before is only looked at
    return result, torch.cat([p.detach().double().reshape(-1) for p in first.parameters()]), len(seen)


@pytest.mark.parametrize("workers", [2, 4, 7, 23])
@pytest.mark.parametrize(
    "job",
    [
        SMALL,
        replace(SMALL, optimizer=adam),
        replace(SMALL, optimizer=groups, schedule=falling),
        replace(SMALL, model=lambda: WithUnused().double()),
        replace(SMALL, model=TwoDtypes),
    ],
    ids=["sgd", "adam", "groups_and_schedule", "unused", "two_dtypes"],
)
def test_one_model_tells_what_all_workers_do(job: Job, workers: int) -> None:
    """90 samples: with 23 workers a step has 69 of them and the next one 21 and a worker's two are none; with 7 a last
    batch of 6 joins the one before."""
    (alone, apart, _), (result, together, models) = (trained(job, workers, batched=each) for each in (False, True))
    close = 1e-6 if job.model is TwoDtypes else 1e-9
    torch.testing.assert_close(together, apart, rtol=0, atol=close * float(apart.abs().max()))
    assert (result.seconds, result.trace_hash, result.samples) == (alone.seconds, alone.trace_hash, alone.samples)
    assert result.train_loss == pytest.approx(alone.train_loss, rel=10 * close)
    assert (result.bytes_sent_per_rank, result.accuracy) == (alone.bytes_sent_per_rank, alone.accuracy)
    assert models <= 1 + 2 < 1 + workers or workers == 2


def test_rows_scores_and_the_end_are_the_same(tmp_path: Path) -> None:
    rows = []
    for batched in (False, True):
        out = tmp_path / str(batched)
        trained(SMALL, 4, batched=batched, out=out, steps=None, epochs=50, until={"accuracy": 0.35})
        rows.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert len(rows[0]) == len(rows[1]) > 3
    for before, after in zip(*rows, strict=True):
        assert before.pop("kind") == after.pop("kind")
        for op, totals in before.pop("ops", {}).items():
            assert after["ops"][op] == pytest.approx(totals, rel=1e-9)
        after.pop("ops", None)
        assert after == pytest.approx(before, rel=1e-9)


def in_step(strategy: Strategy, cluster: Cluster, job: Job = SMALL, **options: Any) -> list[range]:
    batch = {} if "global_batch_size" in options else {"batch_size": 3}
    spec = RunSpec.of(job, strategy, 6, RunOptions(**{"steps": 4} | batch | options))
    return groups_in_step(spec, cluster, job.data(None), {p.dtype for p in job.model().parameters()})


def test_who_is_in_step() -> None:
    assert in_step(s.sync_sgd(), EVEN) == [range(6)]
    assert in_step(s.sync_sgd(), EVEN, batch_size=4) == [range(6)]
    assert in_step(s.sync_sgd(), EVEN, global_batch_size=20) == [range(2), range(2, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [
        (s.sync_sgd(route=pt.collectives.ring), EVEN),
        (Strategy("twice", gradients=chain(mean(), mean())), EVEN),
        (s.local_sgd(), EVEN),
        (s.top_k_sgd(), EVEN),
        (s.sync_sgd(), pt.cluster.ethernet(stragglers=pt.cluster.lognormal())),
        (s.sync_sgd(), pt.cluster.ethernet(stragglers=pt.cluster.slow_host(3))),
        (s.sync_sgd(), replace(EVEN, faults=(pt.cluster.Pause(3, 1, 0.5),))),
        (s.sync_sgd(), replace(EVEN, workers_per_host=4, cores=2)),
    ],
    ids=["ring", "two means", "local_sgd", "top_k", "stragglers", "slow_host", "pause", "cores"],
)
def test_who_is_not(strategy: Strategy, cluster: Cluster) -> None:
    assert in_step(strategy, cluster) == []


def test_not_in_16_bits_nor_where_all_workers_are_saved(tmp_path: Path) -> None:
    half = replace(SMALL, model=lambda: nn.Linear(9, 5).half())
    assert in_step(s.sync_sgd(), EVEN, job=half) == []
    assert in_step(s.sync_sgd(), EVEN, out=tmp_path, checkpoint_every=2) == []


def bad_loss(output: Tensor, target: Tensor) -> Tensor:
    """Infinite for a large output."""
    return nn.functional.cross_entropy(output, target) / (output.abs().max() < 1e4)


def bad_gradient(output: Tensor, target: Tensor) -> Tensor:
    """Finite, with a gradient that is not, for a large output."""
    large = (output.abs().max() > 1e4).double()
    return nn.functional.cross_entropy(output, target) + torch.sqrt((output.sum() * 0) * large + 1 - large)


def test_what_is_not_finite_is_named_as_without() -> None:
    data = made(1, 90)
    data.tensors[0][37, 0] = 1e6  # of one worker in some step

    linear = replace(SMALL, model=lambda: nn.Linear(9, 5).double(), data=lambda folder: pt.Data(data))
    for loss in (bad_loss, bad_gradient):
        said = []
        for batched in (False, True):
            with pytest.raises(NotFinite) as caught:
                trained(replace(linear, loss=loss), 5, batched=batched)
            said.append((caught.value.step, caught.value.rank, caught.value.parameter, str(caught.value)))
        assert said[0] == said[1]


def test_a_group_gets_equally_many_samples_in_every_step() -> None:
    for samples, batch, size in product(range(1, 40), range(1, 12), range(1, 12)):
        if size > min(batch, samples):
            continue
        steps = [[stop - start for start, stop in slices(each, size)] for each in global_batches(samples, batch, size)]
        by_rank = list(zip(*steps, strict=True))
        found = alike(samples, batch, size)
        assert [rank for group in found for rank in group] == list(range(size))
        assert all(len({by_rank[rank] for rank in group}) == 1 for group in found)
        assert len({by_rank[group.start] for group in found}) == len(found)


def test_batches_together_are_those_of_each_behind_each_other() -> None:
    data = made(1, 91)
    shards = [DataShard(data, rank=rank, size=6, batch_size=4) for rank in (1, 2, 3)]
    for first, second, third, together in zip(
        *shards, DataShard(data, rank=1, size=6, batch_size=4, together=3), strict=False
    ):
        if len(first[0]) == len(third[0]):
            for *apart, one in zip(first, second, third, together, strict=True):
                assert torch.equal(torch.cat(apart), one)
