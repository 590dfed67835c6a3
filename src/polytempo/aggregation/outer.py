"""An optimizer around the workers: their movement in a round is its gradient.

Source: A. Douillard et al., "DiLoCo: distributed low-communication training of language models",
2023, Algorithm 1; with plain steps, J. Wang et al., "SlowMo", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Port, Promise, State, Transform, call_name, identity, inside
from polytempo.core.cost import num_bytes
from polytempo.core.rule import UpdateRule
from polytempo.core.state import AnchorState
from polytempo.core.transform import cost_of


def from_anchor(transform: Transform, lr: float = 1.0) -> Transform:
    """Let `transform` see Δ = anchor - θ, this rank's movement since the anchor; then θ ← anchor - `lr` · its answer.

    The result becomes the next anchor. One rank alone keeps θ where `transform` then does nothing; else anchor -
    (anchor - θ) is θ to rounding. Where the answer is late (None), θ returns to the anchor: its movement is on its way.
    Memory: one more copy of the parameters.
    """

    if not lr > 0:
        raise ValueError(f"lr is the step along the answer, and over 0; got {lr}")

    def init(parameters: Bundle) -> AnchorState:
        return AnchorState(parameters.copy(), transform.init(parameters))

    async def apply(port: Port, bundle: Bundle, state: AnchorState) -> tuple[Bundle | None, AnchorState]:
        moved = bundle.with_flat(state.anchor.flat - bundle.flat)
        update, inner = await transform.apply(port, moved, state.inner)
        if update is None:
            return bundle.with_flat(state.anchor.flat.clone()), AnchorState(state.anchor, inner)
        arrived = bundle.with_flat(torch.sub(state.anchor.flat, update.flat, alpha=lr))
        return arrived, AnchorState(arrived.copy(), inner)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return cost_of(transform, parameters, num_ranks).remembering(num_bytes(parameters))

    beside = inside(transform.beside, lambda state: state.inner)
    lost = Promise.LINEAR if lr == 1 else Promise.LINEAR | Promise.IDLE_ALONE
    return Transform(init, apply, transform.promises & ~lost, cost, beside, least_ranks=transform.least_ranks)


class MomentumState(NamedTuple):
    """The outer momentum."""

    velocity: Bundle


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> Transform:
    """v ← μv + Δ; the update is lr · (Δ + μv): Nesterov's momentum as torch.optim.SGD writes it.

    With lr = 1 and μ = 0 it hands Δ on.
    """
    made = _outer(call_name(nesterov, locals()), lr, momentum, lambda moved, velocity: moved + momentum * velocity)
    return made._replace(at_server=UpdateRule("sgd", lr, momentum=momentum, nesterov=momentum > 0))


def heavy_ball(lr: float = 1.0, momentum: float = 0.7, clip: float | None = None) -> Transform:
    """v ← μv + Δ; the update is lr · v: Polyak's momentum as torch.optim.SGD writes it.

    `clip`: the largest size of an element of v.
    """
    made = _outer(call_name(heavy_ball, locals()), lr, momentum, lambda moved, velocity: velocity, clip)
    return made._replace(at_server=UpdateRule("sgd", lr, momentum=momentum) if clip is None else None)


def _outer(
    name: str, lr: float, momentum: float, direction: Callable[[Tensor, Tensor], Tensor], clip: float | None = None
) -> Transform:
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is the largest size of an element of the outer momentum, and over 0; got {clip}")
    if not lr > 0 or not 0 <= momentum < 1:
        raise ValueError(f"the outer optimizer needs lr > 0 and momentum in [0, 1), got {lr} and {momentum}")
    if (lr, momentum, clip) == (1, 0, None):
        return identity()._replace(name=name)

    def init(parameters: Bundle) -> MomentumState:
        return MomentumState(parameters.map(lambda flat: flat.new_zeros(flat.shape)))

    async def apply(port: Port, bundle: Bundle, state: MomentumState) -> tuple[Bundle | None, MomentumState]:
        velocity = state.velocity.flat * momentum + bundle.flat
        if clip is not None:
            velocity = velocity.clamp(-clip, clip)
        return bundle.with_flat(lr * direction(bundle.flat, velocity)), MomentumState(bundle.with_flat(velocity))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost(memory_bytes=num_bytes(parameters))

    return Transform(init, apply, Promise.SEPARABLE | Promise.WEIGHS, cost, name=name)


class QuasiGlobalState(NamedTuple):
    """The average movement of this rank's parameters, mixing included, and the inner state."""

    velocity: Bundle
    inner: State


def quasi_global(transform: Transform, momentum: float = 0.9, smoothing: float = 0.9) -> Transform:
    """x⁺ = t(θ - β u); u ← μ u + (1 - μ) (x - x⁺); x ← x⁺, with β = `momentum` and μ = `smoothing`.

    θ is x after a step of the optimizer, and x⁺ after `transform`, which mixes ranks' parameters. So the momentum
    follows the ranks' common movement, where a local one follows a rank's own data. Memory: x and u.
    """
    if not (0 <= momentum < 1 and 0 <= smoothing < 1):
        raise ValueError(f"momentum and smoothing are at least 0 and below 1, got {momentum} and {smoothing}")

    def init(parameters: Bundle) -> AnchorState:
        velocity = parameters.map(lambda flat: flat.new_zeros(flat.shape))
        return AnchorState(parameters.copy(), QuasiGlobalState(velocity, transform.init(parameters)))

    async def apply(port: Port, bundle: Bundle, state: AnchorState) -> tuple[Bundle | None, AnchorState]:
        before = state.inner.velocity.flat
        half = bundle.with_flat(torch.sub(bundle.flat, before, alpha=momentum))
        mixed, inner = await transform.apply(port, half, state.inner.inner)
        arrived = half if mixed is None else mixed
        velocity = bundle.with_flat(before.lerp(state.anchor.flat - arrived.flat, 1 - smoothing))
        return arrived, AnchorState(arrived.copy(), QuasiGlobalState(velocity, inner))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return cost_of(transform, parameters, num_ranks).remembering(2 * num_bytes(parameters))

    beside = inside(transform.beside, lambda state: state.inner.inner)
    lost = Promise.LINEAR | Promise.IDLE_ALONE
    return Transform(init, apply, transform.promises & ~lost, cost, beside, least_ranks=transform.least_ranks)
