"""Talk every H steps, or by a rule; talk only until, or only after, a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from polytempo.core import Bundle, Cost, Port, Promise, State, Steps, Transform, averaging, identity, inside, native
from polytempo.core.cost import Exchange, Sum, ever_rarer, route_name
from polytempo.core.state import Clock, OwnNumbers
from polytempo.core.transform import Applied, cost_of
from polytempo.synchronization.period_rules import EndedRound, PeriodRule


class PeriodState(NamedTuple):
    """The state of `every`, `until` and `after`: steps so far, and the inner transform's state."""

    step: int
    inner: State


class RoundState(NamedTuple):
    """The state of `every` by a rule that looks at numbers."""

    step: int
    """Steps since ranks met."""
    inner: State
    period: int
    """The step with the next meeting."""
    number: int = 0
    """Meetings with a finite number so far."""
    reference: float = 0.0
    """See `EndedRound`."""
    own: OwnNumbers | tuple[()] = ()
    """This rank's losses, or seconds; () for a rule that does not ask for them."""


def every(period: int | PeriodRule, transform: Transform, first: int | None = None) -> Transform:
    """`transform` on steps f, f + H, f + 2H, … (H = `period`, f = `first`, H where it is None); else nothing.

    A `PeriodRule` says how many steps each round has. If it averages a number of ranks' own (`PeriodRule.asks`), that
    goes as running statistics do, so `transform` must be one between all ranks; inside stages and parts of a model it
    is refused (PT1716, PT1707).
    """
    if isinstance(period, PeriodRule):
        if first is not None or isinstance(transform.apply, Timed):
            raise ValueError(
                f"{period} says when rounds begin and end, so it takes no first step, and no period inside"
            )
        if period.following is None:
            return _timed(Timed(transform, period.longest, repeats=period.repeats, unit=period.first))
        return _timed(Timed(transform, period.first, rule=period))
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
    return not isinstance(timed, Timed) or timed.rule is not None or timed.has_turn(state.step + 1)


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
    unit: int = 1
    """A factor of the distances 1, 2, 4, … of `repeats`."""
    rule: PeriodRule | None = None
    """Decides on each round's steps; `period` are the first one's."""

    def turns(self, steps: Steps) -> Steps:
        """The inner transform's `steps`, counted in steps of this one."""
        steps = steps.every(self.period).after(self.after)
        return steps if self.until is None else steps.until(self.until)

    @cached_property
    def own_turns(self) -> list[Steps]:
        """Steps with a turn."""
        if self.repeats is None:
            return [self.turns(Steps())]
        rarer = ever_rarer(self.repeats, longest=self.period // self.unit)
        return [steps.every(self.unit).after(self.after) for steps in rarer]

    @property
    def meeting(self) -> Transform:
        """A transform that meets in its first step as this one does at the end of a period, with the rule's number."""
        rule = self.rule
        return self.transform if rule is None or not rule.asks else _timed(replace(self, rule=rule._replace(first=1)))

    def has_turn(self, step: int) -> bool:
        """True if the inner transform acts at this step."""
        return any(steps.has(step) for steps in self.own_turns)

    def around(self, change: Callable[[Transform], Transform]) -> Transform:
        """`change(transform)` on the same steps."""
        return _timed(replace(self, transform=change(self.transform)))

    async def __call__(self, port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        if self.rule is not None:
            state = await self._observed(port, bundle, state, self.rule)
            return (bundle, state) if state.step < state.period else await self._met(port, bundle, state, self.rule)
        step, inner = state.step + 1, state.inner
        out: Bundle | None = bundle
        if self.repeats is not None and step == self.after:
            inner = self.transform.init(bundle)
        if self.has_turn(step):
            out, inner = await self.transform.apply(port, bundle, inner)
        return out, PeriodState(step, inner)

    async def _observed(self, port: Port, bundle: Bundle, state: RoundState, rule: PeriodRule) -> RoundState:
        """The state with this step's number."""
        state, own = state._replace(step=state.step + 1), state.own
        if rule.sees == "seconds":
            now, before = await port.now(), own.clock.now_s if own else None
            counted = OwnNumbers(clock=Clock(now)) if not own else own._replace(clock=Clock(now))
            if before is not None:  # else the process has read data and compiled before
                counted = counted._replace(total=counted.total + now - before, steps=counted.steps + 1)
            return state._replace(own=counted)
        observed = bundle.observed
        if rule.sees == "rate" and state.step == 1:
            assert rule.following is not None, "it looks at numbers"
            period, _ = rule.following(EndedRound(state.number, state.period, _rate(rule, bundle), 0.0))
            return state._replace(period=period)
        if rule.sees == "loss" and bundle.share != 0 and not _has_no_values(bundle):
            if observed is None or observed.loss is None:
                raise ValueError(
                    f"{rule} needs the loss of each step, and this one has none; in a loop of your own call "
                    "handle.scaled(loss).backward(). Stages of a pipeline have none"
                )
            assert own, "the rule asks for numbers"
            return state._replace(own=own._replace(total=own.total + float(observed.loss), steps=own.steps + 1))
        return state

    async def _met(
        self, port: Port, bundle: Bundle, state: RoundState, rule: PeriodRule, *, early: bool = False
    ) -> tuple[Bundle | None, RoundState]:
        """Meet, and decide when to meet next; after a round that ends early, as often as before."""
        before = bundle.flat.clone() if rule.sees == "variance" else None
        average = self.transform.beside or averaging(native)
        unknown = _has_no_values(bundle) and rule.sees != "seconds"
        rate = _rate(rule, bundle) if rule.sees == "variance" and not (early or unknown) else 1.0
        out, inner = await self.transform.apply(port, bundle, state.inner)
        own = state.own
        after = state._replace(step=0, inner=inner, own=OwnNumbers(clock=own.clock) if own else own)
        if early or not own:
            return out, after
        seen = own.total / max(1, own.steps) * (state.step if rule.sees == "seconds" else 1)
        if before is not None and out is not None and not unknown:
            seen = float((before - out.flat).square_().sum(dtype=torch.float64)) / rate if rate > 0 else math.nan
        if port.size > 1:
            told = Bundle({"number": torch.tensor([seen], dtype=torch.float64)}, bundle.share)
            seen = float((await average(port, told, state.inner)).flat)
        if unknown:  # on the meta device: the message is priced, and periods stay
            return out, after
        assert rule.following is not None, "it looks at numbers"
        number = state.number + math.isfinite(seen)
        period, reference = rule.following(EndedRound(number, state.period, seen, state.reference))
        return out, after._replace(period=period, number=number, reference=reference)

    async def at_once(self, port: Port, bundle: Bundle, state: State, step: int) -> tuple[Bundle | None, State]:
        """See `apply_at_once`."""
        if self.rule is not None:
            return await self._met(port, bundle, state, self.rule, early=True)
        inner = state.inner
        out: Bundle | None = bundle
        if self.after < step and (self.until is None or step <= self.until):
            out, inner = await apply_at_once(self.transform, port, bundle, inner, step - self.after)
        return out, PeriodState(step, inner)


def _timed(timed: Timed) -> Transform:
    transform, rule = timed.transform, timed.rule

    def init(parameters: Bundle) -> State:
        inner = transform.init(parameters)
        if rule is None:
            return PeriodState(0, inner)
        return RoundState(0, inner, rule.first, own=OwnNumbers() if rule.asks else ())

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        found = cost_of(transform, parameters, num_ranks)
        if rule is not None:
            number = (_one_number(found),) if rule.asks and num_ranks > 1 else ()
            found = Cost(found.exchanges + number, found.memory_bytes)
            return found.at(lambda steps: timed.turns(steps)._replace(rule=rule.name))
        return found.at(timed.turns) if timed.repeats is None else found.at_each(timed.own_turns)

    beside = inside(transform.beside, lambda state: state.inner)
    kept = transform.promises & ~Promise.SEPARABLE if rule is not None and rule.asks else transform.promises
    return Transform(init, timed, kept, cost, beside, least_ranks=transform.least_ranks)


def _one_number(cost: Cost) -> Exchange:
    """The mean of a number, by the route of an exchange's sums."""
    route = next((each.route for exchange in cost.exchanges for each in exchange.sums), native)
    return Exchange(route_name(route), sums=(Sum(route, 1, torch.float64.itemsize),), tensors="the rule's number")


def _rate(rule: PeriodRule, bundle: Bundle) -> float:
    if bundle.observed is None:
        raise ValueError(f"{rule} needs a learning rate, and only exchanges of parameters after a step have one")
    return float(bundle.observed.rate)


def _has_no_values(bundle: Bundle) -> bool:
    return next(iter(bundle.tensors.values())).is_meta
