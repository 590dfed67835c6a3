"""A scheduled program, and how any of them is performed: schedule, push, pull, round after round.

    schedule()        which parameters are updated now: the same answer on all workers
    push(chosen)      worker p's part of their update's sums, from its part of the data  ─┐ added up
    pull(chosen, Σ)   the parameters have their new values everywhere                       ◀─┘

A program is written over a port, so it runs on real processes and in a virtual world, to the same bits.

Source: J. K. Kim, Q. Ho, S. Lee, X. Zheng, W. Dai, G. A. Gibson and E. P. Xing, "STRADS: a distributed framework for
scheduled model parallel machine learning", EuroSys 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polytempo.core import NotFinite, Port


class Measure(NamedTuple):
    """A program's progress."""

    objective: float
    """The minimised value."""
    error: float | None
    """The number that the tolerance bounds: a bound on the distance to the optimum, or the last sweep's gain."""


class SweepReport(NamedTuple):
    """A program's measures after a sweep; sweep 0 is the beginning."""

    sweep: int
    rounds: int
    updates: int
    """Parameters (or blocks of them) that have been scheduled."""
    seconds: float
    """Seconds of the rounds on worker 0, virtual or real. Measuring does not count."""
    objective: float
    error: float | None


class ScheduledProgram(Protocol):
    """One worker's state of a program that has begun."""

    @property
    def rounds(self) -> int:
        """Rounds of a sweep, which comes to all parameters once."""

    async def schedule(self) -> Tensor:
        """The parameters of this round, int64; equal on all workers."""

    async def push(self, chosen: Tensor) -> Tensor:
        """This worker's part of the sums for the update of `chosen`; the parts of all workers are added."""

    async def pull(self, chosen: Tensor, pushed: Tensor) -> None:
        """Update the parameters by the sum of all parts."""

    async def measure(self) -> Measure:
        """Measure the progress; changes nothing."""

    def parameters(self) -> Mapping[str, Tensor]:
        """The learned parameters: whole, or this worker's part of the `divided` ones."""

    @property
    def divided(self) -> frozenset[str]:
        """Parameters with some rows at each worker, in the order of workers."""


class ScheduledJob(Protocol):
    """A program with its settings; `str` is the call that makes it."""

    def check(self, data: tuple[Any, ...]) -> None:
        """ValueError for data that the program cannot learn from."""

    async def begin(self, port: Port, data: tuple[Any, ...]) -> ScheduledProgram:
        """One worker's state at the beginning. Each worker is given all data, and keeps its part."""


async def performed(
    port: Port, program: ScheduledProgram, *, sweeps: int = 100, tolerance: float = 1e-6
) -> list[SweepReport]:
    """Perform rounds until the error is at most `tolerance`, or for `sweeps` sweeps; measure after each.

    All workers call it, and get the same reports but for the seconds. Errors: `NotFinite` where the objective is.
    """
    reports = [SweepReport(0, 0, 0, 0.0, *await _measured(program, 0))]
    rounds, updates, seconds = 0, 0, 0.0
    for sweep in range(1, sweeps + 1):
        begin_s = await port.now()
        for _ in range(program.rounds):
            await port.mark(rounds)
            chosen = await program.schedule()
            pushed = await added(port, await program.push(chosen))
            await program.pull(chosen, pushed)
            rounds, updates = rounds + 1, updates + chosen.numel()
        seconds += await port.now() - begin_s
        reports.append(SweepReport(sweep, rounds, updates, seconds, *await _measured(program, rounds)))
        error = reports[-1].error
        if error is not None and error <= tolerance:
            break
    return reports


async def _measured(program: ScheduledProgram, step: int) -> Measure:
    measure = await program.measure()
    if not math.isfinite(measure.objective):
        advice = "the updates of a round interfere: choose fewer together, or a lower bound on their correlation"
        raise NotFinite("", None, measure.objective, "the objective", step=step, advice=advice)
    return measure


async def added(port: Port, part: Tensor) -> Tensor:
    """The parts of all workers added in the order of workers, the same bits on each and in both worlds.

    Cost: one all-gather; each worker sends its K numbers to N - 1 others.
    """
    return part if port.size == 1 else reduce(torch.add, await port.all_gather(part.contiguous()))


def borders(weights: Tensor, parts: int) -> list[int]:
    """Cut a row of things so that consecutive parts weigh about the same: `parts` + 1 rising places.

    No part is empty where there are as many things as parts.
    """
    ends, count = torch.cumsum(weights.double(), 0), len(weights)
    goals = ends[-1] / parts * torch.arange(1, parts, dtype=torch.float64)
    places = [0]
    for part, place in enumerate((torch.searchsorted(ends, goals) + 1).tolist(), start=1):
        places.append(min(max(place, places[-1] + 1), max(count - parts + part, places[-1])))
    return [*places, count]


def check_kinds(data: tuple[Any, ...], kinds: tuple[type, ...], expected: str) -> None:
    """Raise ValueError with the `expected` kinds where the parts of `data` have others."""
    if len(data) != len(kinds) or not all(isinstance(each, kind) for each, kind in zip(data, kinds, strict=True)):
        raise ValueError(f"{expected}, got ({', '.join(type(each).__name__ for each in data)})")


def check_places(name: str, places: Tensor, number: int) -> None:
    """ValueError where a place is none of 0 to `number` - 1."""
    if not 0 <= int(places.min()) <= int(places.max()) < number:
        raise ValueError(f"{name} must be in 0 to {number - 1}, got {int(places.min())} to {int(places.max())}")
