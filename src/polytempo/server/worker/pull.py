"""Where a worker's parameters come from: the server's, every m steps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from polytempo.core import Bundle, Cost, Exchange, Late, Port, State, Steps, Transform
from polytempo.core.state import settled
from polytempo.server.worker.background_exchange import begin


class Pulling(NamedTuple):
    """Steps so far, and the parameters that were asked for in the step before (None: none were)."""

    step: int
    due: Late | Bundle | None


def pull(every: int = 1, *, overlap: bool = False) -> Transform:
    """Continue from the server's parameters after steps m, 2m, 3m, … (m = `every`, Downpour's n_fetch).

    With `overlap` they are only asked for then, and used after the step that follows, which their way hides behind.
    What the worker changed by itself meanwhile is forgotten; the server knows it from what was pushed. The parameters
    before the first step are the affair of the worker's program.

    The bundle that it answers is lent by the server: it is for reading. With `overlap` it is the worker's own copy.
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
