"""`DriftWatch`: ranks that promise equal models compare hashes of them while they train, and name who has drifted.

exchange k ── step k: look ── exchange k+1: all-gather begins ── step k+1 ── exchange k+2: all have heard, compare

A look comes every `every` steps, so that it costs at most half a percent of them, and at least so often that all of the
model has been seen within 256 steps. Ranks agree on `every`: each sends its own bound with its look.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Any, Literal
from weakref import proxy

from torch import Tensor

from polytempo.core import Drifted, PolytempoError, Port
from polytempo.training.checkpoint.optimizer_state import broadcast_optimizer
from polytempo.training.hooks.drift import (
    Compared,
    DriftLook,
    DriftVerdict,
    Walk,
    comparable,
    compared,
    described,
    difference,
    judged,
    look_of,
    looked,
    value_of,
)
from polytempo.training.model.agree import broadcast_model, gather_json
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld, beside

OnDrift = Literal["stop", "restore", "ignore"]

MAX_STEPS = 256
"""Bound on the steps of a pass over all compared tensors; the answer needs two more."""
_MAX_COST = 0.0035
"""Bound on the part of a step's time. The clock does not see all costs; half a percent includes them."""
_MAX_RESTORES = 10
_REMEDY = (
    "The strategy promises equal models after each step, so a rank missed a step, loaded or changed something alone, "
    "computes in other bits (another number of threads, another processor), or its memory is faulty. Go on from the "
    'last checkpoint; on_drift="restore" takes the state from the majority, on_drift="ignore" compares nothing'
)


class DriftWatch:
    """One rank's part. All ranks of `data` make one, and call its methods at the same places of their exchanges.

    Its messages stand in no trace and in no total of bytes: a run is the same with and without.
    """

    def __init__(self, world: ProcessWorld, data: Port, replica: Replica, what: Compared, on_drift: OnDrift) -> None:
        self._world, self._data, self._replica = beside(world), data, proxy(replica)
        self._what, self._on_drift = what, on_drift
        self._walk = Walk()
        self._look: DriftLook | None = None
        self._pending: Any = None
        self._exchanges, self._due = 0, 1
        """Exchanges so far, and the number that makes the next look due."""
        self._every = 1
        self._cost = _Cost()
        self._num_restores = 0

    # ------------------------------------------------------------------ while it trains

    def after_exchange(self) -> None:
        """All ranks have exchanged something: receive the last looks, and send a new one.

        Raises `Drifted` if ranks differ.
        """
        self._exchanges += 1
        if self._pending is None and self._exchanges <= self._due:
            return
        begin_ns = time.thread_time_ns()
        self._hear()
        if self._exchanges > self._due:
            look, self._look = self._look or DriftLook(self._replica.step, 0, 0, 0, 0, 1, 1), None
            look = look._replace(num_slices=self._walk.num_slices, every=self._cost.affordable(self._exchanges))
            self._pending = self._world.launch(_gathered(self._data, look))
            self._due = self._exchanges + self._every - 1
        self._cost.spent_ns += time.thread_time_ns() - begin_ns

    def after_step(self) -> None:
        """This rank has finished a step: look at the next slice, if it is time."""
        if self._look is None and self._exchanges >= self._due:
            begin_ns = time.thread_time_ns()
            pieces = self._walk.next(list(comparable(self._replica, self._what).values()))
            self._look = looked(self._replica, self._what, pieces, buffers=True)
            self._cost.spent_ns += time.thread_time_ns() - begin_ns
            self._cost.num_looks += 1

    def _hear(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        looks: list[DriftLook] = pending.wait()
        most = max(1, MAX_STEPS // max(look.num_slices for look in looks))
        self._every = min(most, max(look.every for look in looks))
        if not any(look.fresh for look in looks):
            self._due = self._exchanges  # no rank used that exchange for a step
        self._judge(looks)

    # ------------------------------------------------------------------ at a checkpoint

    def check(self, *, buffers: bool) -> None:
        """Compare everything now; `buffers`, too, which are equal right after a step. All ranks call it."""
        self._hear()
        tensors = list(comparable(self._replica, self._what).values())
        look = looked(self._replica, self._what, tensors, buffers=buffers)
        self._judge(self._world.drive(_gathered(self._data, look)))

    def end(self) -> None:
        """Wait for the looks under way."""
        pending, self._pending = self._pending, None
        with suppress(PolytempoError):
            if pending is not None:
                pending.wait()

    # ------------------------------------------------------------------ when ranks differ

    def _judge(self, looks: Sequence[DriftLook]) -> None:
        verdict = judged(looks)
        if not verdict.others:
            return
        descriptions = self._world.drive(gather_json(self._data, described(self._replica, self._what)))
        text = _told(self._data, looks, verdict, descriptions)
        restores = self._on_drift == "restore" and verdict.healthy
        if not restores or self._num_restores == _MAX_RESTORES:
            raise Drifted(text + ". " + _REMEDY, self._named(verdict.others) if verdict.healthy else [])
        self._num_restores += 1
        self._world.drive(_restored(self._data, self._replica, self._what, verdict))
        self._replica.step = descriptions[verdict.healthy[0]]["step"]
        self._walk, self._look = Walk(), None
        if self._data.rank == 0:
            source = self._named(verdict.healthy)[0]
            print(f"polytempo: {text}; took over the state of rank {source}", file=sys.stderr)

    def _named(self, positions: Sequence[int]) -> list[int]:
        return [self._data.members[position] for position in positions]


def watch(world: ProcessWorld, data: Port, replica: Replica, on_drift: OnDrift) -> DriftWatch | None:
    """Watch the parts that the strategy promises to be equal; None if it promises none, and for "ignore"."""
    if on_drift not in ("stop", "restore", "ignore"):
        raise ValueError(f"on_drift must be 'stop', 'restore' or 'ignore', got {on_drift!r}")
    what = compared(replica)
    if data.size == 1 or on_drift == "ignore" or what is None:
        return None
    return DriftWatch(world, data, replica, what, on_drift)


class _Cost:
    """Processor time of looks, and clock time of steps, on this rank.

    Waiting for another rank in a look shortens the wait in the next exchange, so it counts as 0.
    """

    def __init__(self) -> None:
        self.spent_ns, self.num_looks = 0, 0
        """Since the last answer."""
        self._begin_ns, self._begin_exchanges = time.perf_counter_ns(), 0
        self._every: float | None = None

    def affordable(self, exchanges: int) -> int:
        """Steps between looks that keep the cost within its bound, by the latest measurements."""
        now_ns = time.perf_counter_ns()
        steps, took_ns = exchanges - self._begin_exchanges, now_ns - self._begin_ns
        looks, spent_ns = max(1, self.num_looks), self.spent_ns
        self._begin_ns, self._begin_exchanges = now_ns, exchanges
        self.spent_ns, self.num_looks = 0, 0
        if steps and self._begin_exchanges > steps:  # the first steps warm up
            step_ns = max(1, took_ns) / steps
            every = spent_ns / looks / (_MAX_COST * step_ns)
            self._every = every if self._every is None else self._every + 0.3 * (every - self._every)
        return min(MAX_STEPS, max(1, ceil(self._every or 1)))


async def _gathered(port: Port, look: DriftLook) -> list[DriftLook]:
    answers: list[Tensor] = await port.all_gather(look.tensor())
    return [look_of(answer) for answer in answers]


async def _restored(port: Port, replica: Replica, what: Compared, verdict: DriftVerdict) -> None:
    source, into = verdict.healthy[0], frozenset(verdict.others)
    with replica.in_float32():
        await broadcast_model(port, replica.model, source=source, into=into)
    if what.optimizer:
        await broadcast_optimizer(port, replica.optimizer, source=source, into=into)


def _told(port: Port, looks: Sequence[DriftLook], verdict: DriftVerdict, descriptions: Sequence[Any]) -> str:
    """The error's text: the ranks, the part, and both values."""
    first = (verdict.healthy or verdict.others)[0]
    other = next(rank for rank in verdict.others if looks[rank][:5] != looks[first][:5])
    name = difference(descriptions[first], descriptions[other])
    if name is not None:
        values = [value_of(description, name) for description in descriptions]
    else:
        kinds = {"tensors": "parameters and optimizer state", "buffers": "running statistics", "settings": "options"}
        field = next((f for f in kinds if getattr(looks[first], f) != getattr(looks[other], f)), "steps")
        name = f"a hash of {kinds[field]}" if field in kinds else "the number of optimizer steps"
        values = [f"{getattr(look, field):x}" for look in looks]
    said = ", ".join(
        f"{value} on {_ranks(port, [r for r, v in enumerate(values) if v == value])}" for value in dict.fromkeys(values)
    )
    step = max(look.steps for look in looks)
    if verdict.healthy:
        who = f"{_ranks(port, verdict.others)} drifted from {_ranks(port, verdict.healthy)}"
    else:
        who = f"{_ranks(port, verdict.others)} have drifted apart, and no majority says which of them is right"
    return f"step {step}: {who}: {name} is {said}"


def _ranks(port: Port, positions: Sequence[int]) -> str:
    ranks = [port.members[position] for position in positions]
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
