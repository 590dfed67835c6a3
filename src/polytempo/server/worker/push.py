"""A worker pushes the sum of its gradients, every n steps."""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import Bundle, Cost, Exchange, Late, Port, State, Steps, Transform
from polytempo.core.state import settled
from polytempo.server.worker.background_exchange import begin


class Pushing(NamedTuple):
    """Steps so far, the sum that has not been pushed, and the pushes under way, oldest first (None: no push)."""

    step: int
    accrued: Bundle | None
    under_way: tuple[Late | None, ...]


def push(every: int = 1, *, overlap: bool = False, steps_locally: bool = False) -> Transform:
    """Push the sum of the gradients of `every` steps (Downpour's n_push) at steps n, 2n, 3n, …

        every=2      step    1      2      3      4      5      6
        begins to push       -    g1+g2    -    g3+g4    -    g5+g6
        has waited for       -      -    g1+g2    -    g3+g4    -
        ... with overlap     -      -      -      -    g1+g2    -

    A push is only begun here, so that a pull of the same step follows it at once: both together are one round trip.
    A worker that pulls every step thus waits for the push, too.

    `steps_locally`: the gradient also goes to the worker's own optimizer, unchanged, and what is pushed is a copy.
    Otherwise the worker's optimizer takes no step.

    Memory: with every=1 the gradient is pushed from where it lies; a local step costs a copy of it, and overlap one
    more.
    """
    if every < 1:
        raise ValueError(f"push needs a period of at least 1 step, got every={every}")

    def init(parameters: Bundle) -> Pushing:
        return Pushing(0, None, (None,) * (2 if overlap else 1))

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Pushing]:
        assert isinstance(state, Pushing)
        oldest, *others = state.under_way
        await settled(oldest)
        under_way = (None, *others)
        step = state.step + 1
        sum_so_far = _plus(state.accrued, bundle, steps_locally)
        answer = bundle if steps_locally else None
        if step % every:
            return answer, Pushing(step, sum_so_far, under_way)
        late = await begin(port, port.push(sum_so_far.flat, step), lambda _: None)
        return answer, Pushing(step, None, (*under_way[1:], late))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((Exchange("push", steps=Steps().every(every), server="push"),))

    return Transform(init, apply, separable=False, idle_alone=False, cost=cost)


def _plus(accrued: Bundle | None, bundle: Bundle, copies: bool) -> Bundle:
    """The sum with this step's gradient, in memory that stays as it is until it has been pushed."""
    if accrued is None:
        return bundle.copy() if copies else bundle
    accrued.flat.add_(bundle.flat)
    return accrued
