"""Whole runs of a cut model with parameter servers for its stages: both worlds, killed stages, resumed runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from benchmark_module import benchmark
from polytempo.cluster import ethernet
from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import over_stages
from polytempo.runs.served import run_served
from polytempo.runs.served.process_account import ProcessSupervisor
from polytempo.runs.served.served_run import ServedRun
from polytempo.runs.simulated.simulate_served import simulate_served
from polytempo.server.message import Deal, Outbox
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from staged_job import plain

pytestmark = pytest.mark.process

SEED = random.SystemRandom().randrange(1_000_000)
STEPS = 12
harm = benchmark("parameter_server/harm.py")


def in_step(schedule: schedules.Schedule) -> Strategy:
    """The mean of all replicas' gradients, at the server: the same bits in every run."""
    inner = served("hardsync", Service(hardsync(), shards=2, deals="evenly"))
    return over_stages("stages in step", schedule, inner)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        (pt.strategies.gpipe(2, 2, inner=pt.strategies.async_sgd(shards=2)), 2),
        (in_step(schedules.one_f_one_b(2, 3)), 4),
        (pt.strategies.ddg(2, lockstep=True, inner=pt.strategies.async_sgd(shards=2)), 2),
        (in_step(schedules.pipedream_2bw(2, 3)), 4),
    ],
    ids=["one replica", "two replicas", "one late replica", "two late replicas"],
)
def test_both_worlds_end_with_the_same_bits(strategy: Strategy, workers: int) -> None:
    found = pt.run(plain(), strategy, workers, steps=STEPS, threads=1)
    options = RunOptions(steps=STEPS, threads=1)
    spec = RunSpec.of(plain(), strategy, workers, options)
    expected = simulate_served(spec, ethernet(), native=True)  # shards by the kernel, as in processes
    assert found.parameters_sha256 == expected.parameters_sha256
    assert (found.loss, found.accuracy, found.samples) == (expected.loss, expected.accuracy, expected.samples)
    assert [stage["layers"] for stage in found.stages or ()] == [stage["layers"] for stage in expected.stages or ()]


class First(nn.Module):
    """(batch, tickets) -> (batch, tickets + 1): a weight for each ticket, and its part of the output."""

    def __init__(self, tickets: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(tickets))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, (inputs @ self.first).unsqueeze(1)], dim=1)


class Second(nn.Module):
    """The other weight for each ticket."""

    def __init__(self, tickets: int) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.zeros(tickets))

    def forward(self, passed: Tensor) -> Tensor:
        return passed[:, :-1] @ self.second + passed[:, -1]


def counting(tickets: int) -> pt.Job:
    """`harm.counting` with a model that can be cut: each stage's weights count its tickets down."""
    return replace(harm.counting(tickets), model=lambda: nn.Sequential(First(tickets), Second(tickets)))


def told(
    launch: Callable[[ServedRun, ProcessSupervisor], Any], job: pt.Job, schedule: schedules.Schedule, **options: Any
) -> Any:
    """`harm.told` with two replicas of two stages."""
    launchers = []

    def launched(run: ServedRun, supervisor: ProcessSupervisor) -> Any:
        launchers.append(launch(run, supervisor))
        return launchers[-1]

    strategy = over_stages(str(schedule), schedule, pt.strategies.async_sgd(replicas=1, rate=1.0))
    with harm.private_folder() as folder, patch.object(run_served, "Launcher", launched):
        result = pt.run(job, strategy, 4, epochs=1, threads=1, **options)
        left = harm.left_behind(folder, launchers[0].processes)
    return harm.Story(result, launchers[0], harm.wrong_with(result, launchers[0]) + left)


@pytest.mark.parametrize("schedule", [schedules.gpipe(2, 1), schedules.ddg(2)], ids=str)
def test_every_stage_and_copy_may_be_killed_and_each_ticket_counts_once_at_each_stage(
    schedule: schedules.Schedule,
) -> None:
    print(f"seed {SEED}")
    plan = random.Random(SEED)
    victims = [("worker", worker) for worker in range(4)] + [("head", 0), ("tail", 1)]
    plan.shuffle(victims)
    points = sorted(plan.randrange(200) for _ in victims)
    faults = [harm.Fault(point, *victim) for point, victim in zip(points, victims, strict=True)]
    story = told(lambda run, supervisor: harm.Watching(run, supervisor, faults, SEED), counting(600), schedule)
    assert story.wrong == []
    assert sorted(each.fault[1:3] for each in story.launcher.recoveries) == sorted(victims)
    said = [(event["who"].partition(".")[0], event["then"]) for event in story.result.server["events"]]
    assert all((f"worker-{worker}", "started again, and its replica") in said for worker in range(4))


class Last(harm.Watching):  # type: ignore[misc, name-defined]
    """Kills the second stage of the replica that is first ordered to finish: every batch is done then."""

    def _noted(self, out: Outbox) -> Outbox:
        super()._noted(out)
        for _, message in out:
            if isinstance(message, Deal) and message.order == "finish" and not self.recoveries:
                self.strike(harm.Fault(0, "worker", self.run.plan.topology.replica_of(message.worker)[1]))
        return out


def test_a_stage_that_is_killed_with_the_order_to_finish_ends_its_replica() -> None:
    story = told(lambda run, supervisor: Last(run, supervisor, (), SEED), counting(40), schedules.gpipe(2, 1))
    assert story.wrong == []
    assert [event["then"] for event in story.result.server["events"]] == ["not started again: all batches were done"]


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    """The snapshot has the whole model, shard by shard, in the stages' order."""
    strategy = in_step(schedules.one_f_one_b(2, 3))
    expected = pt.run(plain(), strategy, 4, steps=STEPS, threads=1)
    pt.run(plain(), strategy, 4, steps=6, threads=1, out=tmp_path)
    resumed = pt.run(plain(), strategy, 4, steps=STEPS, threads=1, out=tmp_path, resume=True)
    assert (resumed.parameters_sha256, resumed.loss) == (expected.parameters_sha256, expected.loss)


def test_a_late_run_goes_on_from_its_checkpoint_and_uses_each_batch_once(tmp_path: Path) -> None:
    """Gradients under way have made their updates when the first part ends."""
    strategy = pt.strategies.pipelined_backprop(2, inner=pt.strategies.async_sgd())
    pt.run(plain(), strategy, 2, steps=5, threads=1, out=tmp_path)
    resumed = pt.run(plain(), strategy, 2, steps=STEPS, threads=1, out=tmp_path, resume=True)
    assert resumed.server["updates"] == STEPS
    assert resumed.ledger
    assert all((epoch["once"], epoch["samples"]) == (68, 68) for epoch in resumed.ledger)
