"""A cut model with parameter servers for its stages, simulated; on real processes: `process/test_served_stages`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.cluster import Crash, ethernet
from polytempo.compression import bf16, feedback
from polytempo.core import PolytempoError, Strategy
from polytempo.core.rule import Service
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import over_stages
from polytempo.runs.served.served_program import ServedProgram
from polytempo.server.layout import Parameter, Span, stage_spans
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from staged_job import in_double, plain, points

FEW = [
    pt.strategies.async_sgd(shards=2, codec=feedback(bf16()), pull_codec=bf16()),
    pt.strategies.downpour(),
    pt.strategies.easgd(),
    pt.strategies.ssp(bound=0),
]
"""Codecs, held-back gradients, travelling parameters, and waiting workers."""
SCHEDULES = [
    schedules.one_f_one_b(3, 2),
    schedules.interleaved(2, 2),
    schedules.zero_bubble(2, 3),
]


def final(strategy: Strategy, workers: int, **options: Any) -> list[float]:
    """The losses of the final model, on all that it was trained on, and of the last step."""
    found = pt.simulate(in_double(), strategy, workers, threads=1, **options)
    assert found.loss is not None
    assert found.train_loss is not None
    return [found.loss, found.train_loss]


def synchronous(shards: int = 1) -> Strategy:
    """The mean of all replicas' gradients."""
    return served(f"hardsync, {shards} shards", Service(hardsync(), shards=shards, deals="evenly"))


@pytest.mark.parametrize("inner", FEW, ids=str)
def test_one_stage_is_the_served_strategy_itself(inner: Strategy) -> None:
    """One micro-batch, to the bit."""
    staged = pt.strategies.gpipe(1, 1, inner=inner)
    ours, expected = (pt.simulate(plain(), each, 1, steps=6, threads=1) for each in (staged, inner))
    assert ours.parameters_sha256 == expected.parameters_sha256
    assert ours.server["updates"] == expected.server["updates"]
    assert ours.ledger == expected.ledger


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_one_replica_by_async_sgd_is_plain_training(schedule: schedules.Schedule) -> None:
    strategy = over_stages("staged", schedule, pt.strategies.async_sgd(shards=2))
    expected = final(pt.strategies.sync_sgd(), 1, steps=9)
    assert final(strategy, schedule.stages, steps=9) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_replicas_in_step_are_workers_of_the_same_server_without_stages() -> None:
    inner = synchronous(shards=2)
    staged = over_stages("staged", schedules.one_f_one_b(2, 3), inner)
    expected = final(inner, 3, steps=6)
    assert final(staged, 6, steps=6) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("inner", FEW, ids=str)
def test_each_batch_counts_once_at_each_stage(inner: Strategy) -> None:
    """The ledger counts a sample that one shard lacks, or has twice."""
    untested = replace(plain(), data=lambda _: pt.Data(points(72, 0)))
    found = pt.simulate(untested, pt.strategies.gpipe(2, 2, inner=inner), 4, epochs=1, threads=1)
    assert found.ledger is not None
    assert [(epoch["once"], epoch["samples"]) for epoch in found.ledger] == [(72, 72)]
    assert inner.server is not None
    assert found.server["shards"] == 2 * inner.server.shards


def test_a_stage_s_shards_have_its_parameters_in_the_whole_model_s_order() -> None:
    """a and c are at the stage, which has c first; each shard has about half of the stage's 10 elements."""
    a, b, c = Parameter("a", 4), Parameter("b", 3), Parameter("c", 6)
    first, second = stage_spans((a, b, c), (c, a), 2)
    assert (first.whole, first.own) == ((Span(0, 4), Span(7, 8)), (Span(6, 10), Span(0, 1)))
    assert (second.whole, second.own) == ((Span(8, 13),), (Span(1, 6),))
    [whole] = stage_spans((a, b, c), (a, b, c), 1)
    assert whole.whole == whole.own == (Span(0, 13),)


def test_every_parameter_is_in_one_shard_of_its_stage() -> None:
    strategy = pt.strategies.interleaved(2, 2, inner=pt.strategies.downpour(shards=3))
    program = ServedProgram(RunSpec.of(plain(), strategy, 4, RunOptions(steps=1)))
    held = sorted(span for spans in program.plan.spans for span in spans)
    assert [(a.end, b.begin) for a, b in pairwise(held) if a.end != b.begin] == []
    assert (held[0].begin, held[-1].end, len(program.plan.spans)) == (0, program.plan.weights.numel(), 6)
    assert [program.plan.first_worker(shard) for shard in range(6)] == [0, 0, 0, 2, 2, 2]
    assert program.plan.topology.replica_of(3) == (1, 3)
    assert program.plan.topology.beside(3) == (2, 3)


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.out(self.last(self.middle(self.first(x).tanh()).tanh()))
        return answer


def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """The last parameter has a group of its own: of the whole model another one than of its first stage."""
    *others, last = parameters
    return torch.optim.SGD([{"params": others}, {"params": [last], "lr": 10 * lr}], lr=lr)


@pytest.mark.parametrize(
    ("more", "inner", "says"),
    [
        ({"model": Tied}, pt.strategies.async_sgd(), "parameter first.weight is used by several stages"),
        ({"optimizer": grouped}, pt.strategies.async_sgd(), "the optimizer of stage 0 has .* in parameter group 1"),
    ],
    ids=["tied", "groups"],
)
def test_what_stages_with_servers_cannot_do_is_refused(more: Any, inner: Strategy, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pt.simulate(replace(plain(), **more), pt.strategies.gpipe(2, 2, inner=inner), 2, steps=1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pt.strategies.gpipe(2, inner=pt.strategies.async_sgd(hierarchical=True)), "PT1721"),
        (lambda: pt.strategies.gpipe(2, inner=pt.strategies.flexrr()), "PT1722"),
        (lambda: pt.strategies.gpipe(2, inner=pt.strategies.hogwild()), "PT1711"),
    ],
)
def test_strategies_that_do_not_go_together_are_refused_when_they_are_made(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_numbers_that_do_not_fit_are_refused() -> None:
    many = pt.strategies.gpipe(2, 250, inner=pt.strategies.async_sgd())
    with pytest.raises(ValueError, match="may have 250 tensors on their way from one stage to another"):
        pt.simulate(plain(), many, 2, steps=1)
    with pytest.raises(ValueError, match=r"at most 64 shards, .* got shards=80"):
        pt.simulate(plain(), pt.strategies.gpipe(2, 2, inner=pt.strategies.async_sgd(shards=40)), 2, steps=1)
    with pytest.raises(ValueError, match="leave out reshape"):
        pt.simulate(plain(), pt.strategies.gpipe(2, 2, inner=pt.strategies.async_sgd()), 2, epochs=2, reshape={1: 3})
    backups = pt.strategies.gpipe(2, 2, inner=pt.strategies.backup_workers(backups=1))
    with pytest.raises(ValueError, match=r"needs at least 4 workers, 2 replicas of 2 stages, .* there are 2"):
        pt.simulate(plain(), backups, 2, steps=1)


def test_a_crash_of_a_stage_ends_a_simulation_with_its_name() -> None:
    cluster = replace(ethernet(), faults=(Crash(rank=3, at_s=0.001),))
    strategy = pt.strategies.gpipe(2, 2, inner=pt.strategies.async_sgd())
    with pytest.raises(PolytempoError, match="worker 3, which held stage 1 of the model that workers 1, 3 held"):
        pt.simulate(plain(), strategy, 4, cluster, steps=50)


def test_watching_changes_nothing() -> None:
    strategy = pt.strategies.one_f_one_b(2, 3, inner=pt.strategies.async_sgd())
    watched = pt.simulate(plain(), strategy, 4, epochs=1, threads=1)
    alone = pt.simulate(replace(plain(), data=lambda _: pt.Data(points(68, 0))), strategy, 4, epochs=1, threads=1)
    assert (watched.parameters_sha256, watched.trace_hash) == (alone.parameters_sha256, alone.trace_hash)
    assert watched.accuracy is not None


def test_explain_counts_a_stage_s_own_server() -> None:
    inner = pt.strategies.async_sgd(shards=2)
    whole, staged = (pt.explain(each, 4, 1000) for each in (inner, pt.strategies.gpipe(2, inner=inner)))
    pushes, pushed = whole.exchanges[0].exchange.sent, staged.exchanges[0].exchange.sent
    assert (pushes.messages, pushes.payload_bytes) == (8, 16_000)
    assert (pushed.messages, pushed.payload_bytes) == (8, 8_000)  # 2 replicas of 2 stages, each to its own 2 shards


def normed() -> nn.Sequential:
    """A norm in each half."""
    norms = (nn.BatchNorm1d(5), nn.BatchNorm1d(7))
    return nn.Sequential(nn.Linear(4, 5), norms[0], nn.Tanh(), nn.Linear(5, 7), norms[1], nn.Linear(7, 2))


@pytest.mark.parametrize("stages", [1, 2])
def test_running_statistics_of_norms_are_scored_as_without_stages(stages: int) -> None:
    with_norms = replace(plain(), model=normed)
    inner = pt.strategies.async_sgd(shards=2)
    found = pt.simulate(with_norms, pt.strategies.one_f_one_b(stages, 1, inner=inner), stages, steps=9, threads=1)
    expected = pt.simulate(with_norms, inner, 1, steps=9, threads=1)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.parameters_sha256 == expected.parameters_sha256
