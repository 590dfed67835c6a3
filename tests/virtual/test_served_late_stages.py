"""Stages with late gradients and parameter servers, simulated; on processes: `process/test_served_stages`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import polytempo as pt
from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.partition import schedules
from polytempo.partition.schedules import Schedule, pipemare, spectrain
from polytempo.partition.schedules.facts import facts
from polytempo.partition.staged_strategy import over_stages
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from staged_job import in_double, plain, points

LATE = {
    "ddg": schedules.ddg(3),
    "ddg, present weights": schedules.ddg(3, weights="current"),
    "ddg in lockstep": schedules.ddg(2, lockstep=True),
    "features_replay": schedules.features_replay(3),
    "pipelined_backprop": schedules.pipelined_backprop(3),
    "pipelined_backprop by pipemare": schedules.pipelined_backprop(3, correction=pipemare(6, decay=0.2)),
    "pipedream": schedules.pipedream(3),
    "pipedream, vertical": schedules.pipedream(3, vertical_sync=True),
    "pipedream_2bw": schedules.pipedream_2bw(3, 3),
    "synthetic_gradients": schedules.synthetic_gradients(3, lr=0.01),
}
INNER = [
    pt.strategies.async_sgd(shards=2),
    pt.strategies.downpour(push_every=2, pull_every=3),
    pt.strategies.easgd(period=2),
    pt.strategies.ssp(bound=1),
    pt.strategies.softsync(),
]
STEPS = 9


def trained(strategy: Strategy, workers: int) -> pt.Result:
    return pt.simulate(in_double(), strategy, workers, threads=1, steps=STEPS)


@pytest.mark.parametrize("name", LATE)
def test_one_replica_by_async_sgd_is_the_schedule_without_servers(name: str) -> None:
    """Gradients are equally late, rates are the moment's, and gradients under way make their updates in the end.

    Staleness counts the updates since the forward pass: the delay of the stage, and less of the first updates.
    """
    schedule: Schedule = LATE[name]
    expected = trained(over_stages("without", schedule, pt.strategies.sync_sgd()), schedule.stages)
    found = trained(over_stages("with servers", schedule, pt.strategies.async_sgd()), schedule.stages)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    delays = [facts(schedule, stage).delay for stage in range(schedule.stages)]
    assert found.stages is not None
    assert [stage["most_delay"] for stage in found.stages] == delays
    late = sum(min(update, delay) for delay in delays for update in range(STEPS))
    assert found.server["staleness"]["mean"] == pytest.approx(late / (STEPS * len(delays)))


@pytest.mark.parametrize("name", ["ddg", "pipedream_2bw"])
def test_replicas_in_step_are_the_schedule_s_replicas_without_servers(name: str) -> None:
    """Equal batches: 68 samples are 5 of 12 and one of 8, which two replicas share alike."""
    schedule = LATE[name]
    in_step = served("hardsync", Service(hardsync(), shards=2, deals="evenly"))
    both = [over_stages("late", schedule, inner) for inner in (in_step, pt.strategies.sync_sgd())]
    ours, expected = (trained(strategy, 2 * schedule.stages) for strategy in both)
    assert ours.loss == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_one_stage_is_the_served_strategy_itself(inner: Strategy) -> None:
    staged = over_stages("staged", schedules.ddg(1), inner)
    ours, expected = (pt.simulate(plain(), each, 1, steps=6, threads=1) for each in (staged, inner))
    assert ours.parameters_sha256 == expected.parameters_sha256
    assert ours.ledger == expected.ledger


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        *zip(INNER, ["pipelined_backprop", "ddg", "pipedream_2bw", "pipedream_2bw", "ddg"], strict=True),
        (INNER[1], "synthetic_gradients"),
    ],
    ids=str,
)
def test_each_batch_counts_once_at_each_stage(inner: Strategy, name: str) -> None:
    """The ledger counts a sample that one shard lacks, or has twice."""
    untested = replace(plain(), data=lambda _: pt.Data(points(72, 0)))
    strategy = over_stages("late", LATE[name], inner)
    found = pt.simulate(untested, strategy, 2 * strategy.stages, epochs=1, threads=1)
    assert found.ledger is not None
    assert [(epoch["once"], epoch["samples"]) for epoch in found.ledger] == [(72, 72)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pt.strategies.ddg(2, inner=pt.strategies.backup_workers(backups=1)), "up to 1 updates late, so it"),
        (lambda: pt.strategies.pipelined_backprop(3, inner=pt.strategies.dc_asgd()), "up to 4 updates older"),
        (
            lambda: pt.strategies.pipelined_backprop(2, spectrain(), inner=pt.strategies.async_sgd()),
            "momentum, which is in the shards",
        ),
    ],
    ids=["backup workers", "dc_asgd", "spectrain"],
)
def test_what_does_not_go_with_late_gradients_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("inner", [pt.strategies.backup_workers(backups=1), pt.strategies.dc_asgd()], ids=str)
def test_what_needs_present_gradients_goes_with_synthetic_ones(inner: Strategy) -> None:
    """Synthetic gradients are never late."""
    found = pt.simulate(plain(), pt.strategies.synthetic_gradients(2, inner=inner), 4, steps=4, threads=1)
    assert found.parameters_sha256 is not None


def test_spectrain_predicts_by_the_momentum_of_workers_that_step_by_themselves() -> None:
    schedule = schedules.pipelined_backprop(2, correction=spectrain())
    downpour = pt.strategies.downpour(push_every=1, pull_every=1, optimizer="job")
    both = (schedule, replace(schedule, correction=None))
    predicted, plainly = (trained(over_stages("late", each, downpour), 2).loss for each in both)
    assert predicted != plainly
