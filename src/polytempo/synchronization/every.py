"""Talk every H steps; talk only until, or only after, a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from polytempo.core import Bundle, Port, State, Transform, identity, inside
from polytempo.core.cost import Cost, Steps
from polytempo.core.transform import apply_at_once, cost_of


class PeriodState(NamedTuple):
    """The state of `every`, `until` and `after`: steps so far, and the inner transform's state."""

    step: int
    inner: State


def every(period: int, transform: Transform) -> Transform:
    """`transform` on steps H, 2H, 3H, … (H = `period`); nothing on the others."""
    if period < 1:
        raise ValueError(f"period must be at least 1 step, got {period}")
    timed = _when(lambda step: step % period == 0, transform, lambda steps: steps.every(period), lambda step: step)
    return timed._replace(at_once=None) if transform.at_once is not None else timed


def until(step: int, transform: Transform) -> Transform:
    """`transform` on the first `step` steps; nothing afterwards."""
    if step < 0:
        raise ValueError(f"until needs a step >= 0, got {step}")
    if step == 0:
        return identity()
    return _when(
        lambda now: now <= step, transform, lambda steps: steps.until(step), lambda now: now if now <= step else None
    )


def after(step: int, transform: Transform) -> Transform:
    """Nothing on the first `step` steps; `transform` from then on, its own steps counted from there."""
    if step < 0:
        raise ValueError(f"after needs a step >= 0, got {step}")
    return _when(
        lambda now: now > step,
        transform,
        lambda steps: steps.after(step),
        lambda now: now - step if now > step else None,
    )


def _when(
    condition: Callable[[int], bool],
    transform: Transform,
    change: Callable[[Steps], Steps],
    own: Callable[[int], int | None],
) -> Transform:
    """`own`: at which of its own steps the inner transform is, where ranks meet at once; None: they do not by it."""

    def init(parameters: Bundle) -> PeriodState:
        return PeriodState(0, transform.init(parameters))

    async def apply(port: Port, bundle: Bundle, state: PeriodState) -> tuple[Bundle | None, PeriodState]:
        step, inner = state.step + 1, state.inner
        out: Bundle | None = bundle
        if condition(step):
            out, inner = await transform.apply(port, bundle, inner)
        return out, PeriodState(step, inner)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return cost_of(transform, parameters, num_ranks).at(change)

    async def at_once(port: Port, bundle: Bundle, state: PeriodState, step: int) -> tuple[Bundle | None, PeriodState]:
        inner, its = state.inner, own(step)
        out: Bundle | None = bundle
        if its is not None:
            out, inner = await apply_at_once(transform, port, bundle, inner, its)
        return out, PeriodState(step, inner)

    beside = inside(transform.beside, lambda state: state.inner)
    return transform._replace(init=init, apply=apply, cost=cost, beside=beside, at_once=at_once)
