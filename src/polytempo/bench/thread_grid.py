"""`tune threads`: samples a second of a job for each division of the cores over workers, operations and branches.

round 1:  1 worker, its settings one after the other │ 2 workers, theirs │ …      round 2:  2 workers │ … │ 1 worker

Settings of one number of workers live in the same processes, each with a model of its own, and take turns; numbers of
workers take turns, too. A setting's figure is the median over rounds. Those near the best are measured once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.bench.machine import written
from polytempo.bench.rank import LOADED, RUN_S, WAIT_S
from polytempo.bench.turns import Contender, Measurement, figure, ratio, slowest, timed, turns
from polytempo.data.shard import DataShard
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.partition.branches import BranchedModel, Threads
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, model_of, next_batch
from polytempo.spec.objective import loss_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import sync_sgd
from polytempo.training.hooks.attach import AttachOptions, attach_replica
from polytempo.training.job.start import replica_of
from polytempo.worlds import ProcessWorld

NEAR = 0.9
"""Settings that reach so much of the best rate are measured for as many rounds again."""
ALONE = (1, 1, 1)


class GridSetting(NamedTuple):
    """One division of the cores."""

    workers: int
    threads: int
    inter_threads: int

    @property
    def arguments(self) -> str:
        """The options of `polytempo train`."""
        return f"--workers {self.workers} --threads {self.threads} --inter-threads {self.inter_threads}"


class GridPlan(NamedTuple):
    """The plan of the benchmark. `turn_s`: how long a setting's turn lasts, at least three steps."""

    job: Job
    data: str | Path | None
    cores: int
    batch_size: int | None
    """Samples of a worker; None: the job's."""
    global_batch_size: int | None
    """Samples of all workers, in place of `batch_size`."""
    rounds: int
    turn_s: float

    def spec(self, setting: GridSetting) -> RunSpec:
        """The run that `setting` would be of."""
        options = RunOptions(
            data=self.data,
            batch_size=self.batch_size,
            global_batch_size=self.global_batch_size,
            threads=setting.threads,
            inter_threads=setting.inter_threads,
        )
        return RunSpec.of(self.job, sync_sgd(), setting.workers, options)


class Branches(NamedTuple):
    """Parts of a job's model that can run at the same time."""

    width: int
    """Threads that its branches can use; 1 where it has none."""
    reason: str
    """The reason that it has none; "" if it has some."""


def thread_grid(plan: GridPlan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure; the result as `written` lays it out, with the best setting beside the rows.

    A row: workers, threads, inter_threads, samples_per_s (median over rounds, quartiles, each round), and the ratio to
    one thread. `best` is the row of the highest median, `margin` its ratio to the next one's, with quartiles.
    Errors: `WorkerDied` with the lines of a job that fails.
    """
    branches = _found(plan)
    settings = grid(plan.cores, branches.width)
    rates = {each: list[float]() for each in settings}
    _measure(plan, settings, rates, say)
    best = max(median(each) for each in rates.values())
    near = [setting for setting, each in rates.items() if median(each) >= NEAR * best]
    if len(near) > 1:
        _measure(plan, near, rates, say)
    found = {setting: figure(each) for setting, each in rates.items()}
    order = sorted(found, key=lambda each: -found[each].median)
    rows = [_row(setting, found[setting], found[GridSetting(*ALONE)]) for setting in order]
    margin = ratio(*_alike(found[order[0]], found[order[1]]))._asdict() if len(order) > 1 else None
    asked = {
        "job": plan.job.name,
        "cores": plan.cores,
        "batch_size": plan.spec(GridSetting(*ALONE)).batch_size if plan.global_batch_size is None else None,
        "global_batch_size": plan.global_batch_size,
        "rounds": plan.rounds,
        "turn_s": plan.turn_s,
    }
    missing = {"inter_threads": branches.reason} if branches.reason else {}
    return written("threads", asked, missing, rows) | {"best": rows[0], "margin": margin}


def grid(cores: int, width: int) -> list[GridSetting]:
    """All divisions of up to `cores` cores by powers of two, or by all; branches on at most `width` threads."""
    steps = sorted({1 << power for power in range(cores.bit_length())} | {cores})
    return [
        GridSetting(workers, threads, inter)
        for workers in steps
        for threads in steps
        for inter in sorted({each for each in (*steps, width) if each <= width})
        if workers * threads * inter <= cores
    ]


def _row(setting: GridSetting, rate: Measurement, alone: Measurement) -> dict[str, Any]:
    compared = ratio(*_alike(rate, alone))._asdict()
    return {**setting._asdict(), "samples_per_s": rate._asdict(), "to_one_thread": compared}


def _alike(one: Measurement, other: Measurement) -> tuple[Measurement, Measurement]:
    """Both with the rounds that both have."""
    rounds = min(len(one.rounds), len(other.rounds))
    return figure(one.rounds[:rounds]), figure(other.rounds[:rounds])


# ---------------------------------------------------------------------- in processes


def _found(plan: GridPlan) -> Branches:
    """Try the job's model in a process of its own, so that the launcher can still be forked."""

    def work(_: RankInfo) -> list[Any]:
        torch.manual_seed(0)
        model, data = model_of(plan.job), data_of(plan.job, plan.data)
        batch = next_batch(plan.job, _endless(_shard(plan.spec(GridSetting(*ALONE)), data, 0, 1)))
        threaded = Threads(inter=max(2, plan.cores)).apply(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the answer says it
                loss_of(plan.job, model, batch)
        except ValueError as error:
            return [1, str(error)]
        width = _width(threaded.parts)
        return [width, "" if width > 1 else "no branches of the model are worth running on several threads"]

    return Branches(*launch(work, 1, threads=1, timeout_s=WAIT_S)[0])


def _width(parts: BranchedModel | None) -> int:
    regions = () if parts is None else parts.regions
    return max((min(len(each.tasks), ceil(each.operations / each.longest)) for each in regions), default=1)


def _measure(
    plan: GridPlan, settings: Sequence[GridSetting], rates: dict[GridSetting, list[float]], say: Callable[[str], None]
) -> None:
    """Append the rates of so many rounds to each setting's."""
    assert LOADED, "optimizers load it when they are made"
    workers = sorted({each.workers for each in settings})
    for number in range(plan.rounds):
        first = number % len(workers)
        for count in (*workers[first:], *workers[:first]):
            own = [each for each in settings if each.workers == count]
            say(f"round {number + 1} of {plan.rounds}: {count} workers, {len(own)} settings")
            for setting, seconds in _timed(plan, own, number).items():
                rates[setting].append(_samples(plan, setting) / seconds)


def _samples(plan: GridPlan, setting: GridSetting) -> int:
    """Samples of a step, of all workers."""
    return plan.global_batch_size or plan.spec(setting).batch_size * setting.workers


def _timed(plan: GridPlan, settings: Sequence[GridSetting], number: int) -> dict[GridSetting, float]:
    """Seconds of a step of each setting, all of one number of workers; the median of a turn, on the slowest worker."""
    first = number % len(settings)
    ordered = [*settings[first:], *settings[:first]]

    def work(rank_info: RankInfo) -> dict[str, list[list[float]]]:
        world = init(timeout_s=WAIT_S, device="cpu", quiet=True)
        data = data_of(plan.job, plan.data)
        contenders = [_contender(plan, setting, world, data) for setting in ordered]
        return turns(contenders, _Meeting(world), rounds=1, turn_s=plan.turn_s)

    threads = max(each.threads for each in settings)
    by_rank = launch(work, settings[0].workers, threads=threads, timeout_s=RUN_S)
    found = slowest(by_rank, "median")
    return {setting: found[setting.arguments].median for setting in settings}


def _contender(plan: GridPlan, setting: GridSetting, world: ProcessWorld, data: Data) -> Contender:
    """A training loop with a model of its own."""
    spec = plan.spec(setting)
    model, optimizer = replica_of(spec)
    attach_replica(model, optimizer, spec.strategy, world=world, options=AttachOptions(seed=spec.seed))
    batches = _endless(_shard(spec, data, world.rank, world.size))

    def step() -> None:
        batch = next_batch(plan.job, batches)
        optimizer.zero_grad()
        loss_of(plan.job, model, batch).backward()
        optimizer.step()

    run = timed(step)

    def with_threads(calls: int) -> list[float]:
        torch.set_num_threads(setting.threads)
        return run(calls)

    return Contender(setting.arguments, with_threads)


def _shard(spec: RunSpec, data: Data, rank: int, size: int) -> DataShard:
    return DataShard(
        data.training(),
        rank=rank,
        size=size,
        batch_size=spec.batch_size,
        seed=spec.seed,
        global_batch_size=spec.options.global_batch_size,
    )


def _endless(shard: DataShard) -> Iterator[Any]:
    while True:
        yield from shard


class _Meeting:
    """Keeps ranks in step between turns."""

    def __init__(self, world: ProcessWorld) -> None:
        self._world = world

    def barrier(self) -> None:
        """Wait for all."""
        self._world.drive(_met(self._world))

    def agree(self, number: int) -> int:
        """Rank 0's number."""
        return int(self._world.drive(_told(self._world, number)).item())


async def _met(world: ProcessWorld) -> None:
    await world.port.barrier()


async def _told(world: ProcessWorld, number: int) -> Tensor:
    return await world.port.broadcast(torch.tensor([number]))
