"""A worker pulls the server's parameters, every m steps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from polytempo.core import Bundle, Cost, Exchange, Late, Port, State, Steps, Transform
from polytempo.core.state import settled
from polytempo.server.worker.background_exchange import begin


class Pulling(NamedTuple):
    """Steps so far, and the pull that the step before began (None: it began none)."""

    step: int
    due: Late | Bundle | None


def fetched(state: State) -> State:
    """A state of `pull`, settled, of a worker that has just fetched the weights: the step before brought older ones."""
    return state._replace(due=None) if isinstance(state, Pulling) else state


def pull(every: int = 1, *, overlap: bool = False) -> Transform:
    """Continue from the server's parameters after steps m, 2m, 3m, … (m = `every`, Downpour's n_fetch).

    With `overlap` the pull only begins then, and its parameters are used after the step that follows: the message
    travels meanwhile. The worker's own changes of that step are dropped; the server has them by the push. The worker's
    program sets the parameters before the first step.

    The bundle in the answer is lent by the server and read-only. With `overlap` it is the worker's own copy.
    """
    if every < 1:
        raise ValueError(f"pull needs a period of at least 1 step, got every={every}")

    def init(parameters: Bundle) -> Pulling:
        return Pulling(0, None)

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Pulling]:
        assert isinstance(state, Pulling)
        step = state.step + 1
        arrived: Bundle | None = await settled(state.due)
        if step % every:
            return arrived or bundle, Pulling(step, None)
        if not overlap:
            return bundle.with_flat(await port.pull(step)), Pulling(step, None)

        def own(values: Tensor) -> Bundle:
            return bundle.with_flat(values.clone())

        return arrived or bundle, Pulling(step, await begin(port, port.pull(step), own))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((Exchange("pull", steps=Steps().every(every), server="pull"),))

    return Transform(init, apply, separable=False, idle_alone=False, cost=cost)
