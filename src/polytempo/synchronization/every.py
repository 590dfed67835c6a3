"""Talk every H steps; talk only until, or only after, a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from polytempo.core import Bundle, Cost, Port, State, Steps, Transform, identity, inside
from polytempo.core.cost import ever_rarer
from polytempo.core.transform import Applied, cost_of


class PeriodState(NamedTuple):
    """The state of `every`, `until` and `after`: steps so far, and the inner transform's state."""

    step: int
    inner: State


def every(period: int, transform: Transform, first: int | None = None) -> Transform:
    """`transform` on steps f, f + H, f + 2H, … (H = `period`, f = `first`, H where it is None); else nothing."""
    if period < 1:
        raise ValueError(f"period must be at least 1 step, got {period}")
    if first is not None and first < 1:
        raise ValueError(f"steps are counted from 1, got first={first}")
    return _timed(Timed(transform, period=period, after=0 if first is None else first - period))


def until(step: int, transform: Transform) -> Transform:
    """`transform` on the first `step` steps; nothing afterwards."""
    if step < 0:
        raise ValueError(f"until needs a step >= 0, got {step}")
    return _timed(Timed(transform, until=step)) if step else identity()


def after(step: int, transform: Transform) -> Transform:
    """Nothing on the first `step` steps; `transform` from then on, its own steps counted from there."""
    if step < 0:
        raise ValueError(f"after needs a step >= 0, got {step}")
    return _timed(Timed(transform, after=step))


def rarer(longest: int, repeats: int, transform: Transform, begin: int) -> Transform:
    """`transform` on steps 1, 2, 4, … apart from step `begin` on, `repeats` times each, up to `longest` steps apart.

    It acts in all of its own steps. Its state begins at the end of step `begin`, as with an anchor, which is then the
    parameters of that step.
    """
    if longest < 1 or repeats < 1 or begin < 0:
        raise ValueError(
            f"steps apart, turns of each and the begin are 1, 1 and 0 or more; got {longest, repeats, begin}"
        )
    return _timed(Timed(transform, period=longest, after=begin, repeats=repeats))


def has_turn(transform: Transform, state: State) -> bool:
    """False if `apply` would do nothing with this `state`, because it is the turn of other steps."""
    timed = transform.apply
    return not isinstance(timed, Timed) or timed.has_turn(state.step + 1)


def meets_at_once(transform: Transform) -> bool:
    """True if `apply_at_once` lets ranks meet before their period is over. Nested periods do not: a step between two
    meetings is not a whole number of the inner period's steps."""
    timed = transform.apply
    return isinstance(timed, Timed) and (timed.period == 1 or not isinstance(timed.transform.apply, Timed))


def apply_at_once(transform: Transform, port: Port, bundle: Bundle, state: State, step: int) -> Applied:
    """`apply` of the last of the first `step` steps, without the wait for the end of a period (`every`)."""
    timed = transform.apply
    if isinstance(timed, Timed) and meets_at_once(transform):
        return timed.at_once(port, bundle, state, step)
    return timed(port, bundle, state)


@dataclass(frozen=True)
class Timed:
    """The `apply` of a transform with turns at steps `after` + `period`, `after` + 2 `period`, … up to step `until`."""

    transform: Transform
    period: int = 1
    after: int = 0
    until: int | None = None
    repeats: int | None = None
    """See `rarer`: turns at each distance of 1, 2, 4, … steps up to `period`, with a state that begins at `after`."""

    def turns(self, steps: Steps) -> Steps:
        """The inner transform's `steps`, counted in steps of this one."""
        steps = steps.every(self.period).after(self.after)
        return steps if self.until is None else steps.until(self.until)

    @cached_property
    def own_turns(self) -> list[Steps]:
        """Steps with a turn."""
        if self.repeats is None:
            return [self.turns(Steps())]
        return [steps.after(self.after) for steps in ever_rarer(self.repeats, longest=self.period)]

    def has_turn(self, step: int) -> bool:
        """True if the inner transform acts at this step."""
        return any(steps.has(step) for steps in self.own_turns)

    def around(self, change: Callable[[Transform], Transform]) -> Transform:
        """`change(transform)` on the same steps."""
        return _timed(replace(self, transform=change(self.transform)))

    async def __call__(self, port: Port, bundle: Bundle, state: PeriodState) -> tuple[Bundle | None, PeriodState]:
        step, inner = state.step + 1, state.inner
        out: Bundle | None = bundle
        if self.repeats is not None and step == self.after:
            inner = self.transform.init(bundle)
        if self.has_turn(step):
            out, inner = await self.transform.apply(port, bundle, inner)
        return out, PeriodState(step, inner)

    async def at_once(
        self, port: Port, bundle: Bundle, state: PeriodState, step: int
    ) -> tuple[Bundle | None, PeriodState]:
        """See `apply_at_once`."""
        inner = state.inner
        out: Bundle | None = bundle
        if self.after < step and (self.until is None or step <= self.until):
            out, inner = await apply_at_once(self.transform, port, bundle, inner, step - self.after)
        return out, PeriodState(step, inner)


def _timed(timed: Timed) -> Transform:
    transform = timed.transform

    def init(parameters: Bundle) -> PeriodState:
        return PeriodState(0, transform.init(parameters))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        found = cost_of(transform, parameters, num_ranks)
        return found.at(timed.turns) if timed.repeats is None else found.at_each(timed.own_turns)

    beside = inside(transform.beside, lambda state: state.inner)
    return Transform(init, timed, transform.promises, cost, beside)
