"""Exchanges hidden behind computation: gradients that are d steps late, and parameters mixed during the next steps.

Source: for `delayed`, J. Langford, A. Smola and M. Zinkevich, "Slow learners are fast", 2009; with one step, Y. Li et
al., "Pipe-SGD", 2018. For `overlapped`, X. Lian et al., "Can decentralized algorithms outperform centralized
algorithms?", 2017, algorithm 1, where each worker mixes while it computes the gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polytempo.core import Bundle, Late, Port, Promise, State, Transform
from polytempo.core.cost import Cost, num_bytes
from polytempo.core.state import AnchorState, duplicate, settled
from polytempo.core.transform import cost_of


class DelayedState(NamedTuple):
    """Answers on their way, oldest first (None before the first), and the inner transform's state."""

    step: int
    queue: tuple[Late | Bundle | None, ...]
    inner: Late | State


def delayed(delay: int, transform: Transform) -> Transform:
    """Begin `transform` now, and hand out its answer of `delay` steps ago.

        step        0      1      2      3
        begins     t(g0)  t(g1)  t(g2)  t(g3)
        hands out   -      -     t(g0)  t(g1)      for delay 2

    On the first `delay` steps there is no update at all, so weight decay and momentum do not act.
    An answer is waited for only when it is handed out. A transform with state waits for the state that
    the step before leaves, so its exchanges follow each other; exchanges without state (None) may all be
    under way at the same time. It hands out a copy, because the state holds the answer until the step that uses it is
    made. Memory: `delay` + 1 more bundles.
    """
    if delay < 1:
        raise ValueError(f"delay must be at least 1 step, got {delay}; without a delay use the transform itself")

    def init(parameters: Bundle) -> DelayedState:
        return DelayedState(0, (None,) * delay, transform.init(parameters))

    async def begin(port: Port, bundle: Bundle, inner: Late | State) -> tuple[Bundle | None, State]:
        return await transform.apply(port, bundle, duplicate(await _answer(inner)))

    async def apply(port: Port, bundle: Bundle, state: DelayedState) -> tuple[Bundle | None, DelayedState]:
        oldest, *others = state.queue
        due = await _answer(oldest)
        if isinstance(state.inner, Late):  # it will have to wait for its turn, and the tensors may change meanwhile
            bundle = bundle.with_flat(bundle.flat)
        own_messages = port.on_channel_of_series(state.step % (delay + 1), of=delay + 1)
        work = await port.start(begin(own_messages, bundle, state.inner))
        inner = None if state.inner is None else Late(work, 1)
        handed_out = None if due is None else due.copy()
        return handed_out, DelayedState(state.step + 1, (*others, Late(work, 0)), inner)

    async def beside(port: Port, bundle: Bundle, state: DelayedState) -> Bundle:
        assert transform.beside is not None
        return await transform.beside(port, bundle, await _answer(state.inner))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return cost_of(transform, parameters, num_ranks).remembering(delay * num_bytes(parameters))

    promises = transform.promises & (Promise.SEPARABLE | Promise.WEIGHS)
    statistics = None if transform.beside is None else beside
    return Transform(init, apply, promises, cost, statistics, least_ranks=transform.least_ranks)


async def _answer(value: Late | Any) -> Any:
    return (await value.work)[value.part] if isinstance(value, Late) else value


class OverlappedState(NamedTuple):
    """The exchange under way (None before the first), this rank's contribution, and the inner transform's state."""

    coming: Late | Bundle | None
    given: AnchorState


def overlapped(transform: Transform) -> Transform:
    """θ ← t(θ') + (θ - θ'): the answer for θ', the parameters of the last time, plus their movement since.

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

    promises = transform.promises & ~Promise.LINEAR
    statistics = None if transform.beside is None else beside
    return Transform(init, apply, promises, cost, statistics, least_ranks=transform.least_ranks)
