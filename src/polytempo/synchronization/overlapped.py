"""An exchange of parameters behind the steps until the next one.

Source: X. Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, algorithm 1, where each
worker mixes while it computes the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import Bundle, Late, Port, State, Transform
from polytempo.core.arithmetic.anchor import AnchorState
from polytempo.core.cost import Cost, num_bytes
from polytempo.core.state import duplicate, settled
from polytempo.core.transform import cost_of


class OverlappedState(NamedTuple):
    """The exchange under way (None before the first), what this rank gave to it, and the inner transform's state."""

    coming: Late | Bundle | None
    given: AnchorState


def overlapped(transform: Transform) -> Transform:
    """θ ← t(θ') + (θ - θ'): what `transform` makes of the parameters θ' of the last time, and what moved them since.

    Then the exchange of θ begins, and goes on while the next steps are computed. The first time nothing has begun, and
    θ stays. Memory: two more bundles, and a third one
    while they travel.
    """

    def init(parameters: Bundle) -> OverlappedState:
        return OverlappedState(None, AnchorState(parameters.copy(), transform.init(parameters)))

    async def begin(port: Port, bundle: Bundle, inner: State) -> tuple[Bundle | None, State]:
        return await transform.apply(port, bundle, duplicate(inner))

    async def apply(port: Port, bundle: Bundle, state: OverlappedState) -> tuple[Bundle | None, OverlappedState]:
        came, inner = await settled(state.coming), await settled(state.given.inner)
        out = bundle if came is None else bundle.with_flat(came.flat + (bundle.flat - state.given.anchor.flat))
        work = await port.start(begin(port.on_channel_of_series(), out.copy(), inner))
        return out, OverlappedState(Late(work, 0), AnchorState(out.copy(), Late(work, 1)))

    async def beside(port: Port, bundle: Bundle, state: OverlappedState) -> Bundle:
        assert transform.beside is not None
        return await transform.beside(port, bundle, await settled(state.given.inner))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return cost_of(transform, parameters, num_ranks).remembering(2 * num_bytes(parameters))

    return Transform(
        init,
        apply,
        separable=transform.separable,
        idle_alone=transform.idle_alone,
        weighs=transform.weighs,
        cost=cost,
        beside=None if transform.beside is None else beside,
    )
