"""More optimizers around the workers: Adam, schedule-free steps, and a momentum that moves once in several rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Port, Promise, Transform, call_name
from polytempo.core.cost import num_bytes
from polytempo.core.rule import UpdateRule


class OuterState(NamedTuple):
    """Rounds so far, and tensors like the parameters."""

    round: int
    first: Bundle
    second: Bundle | None = None


def adam(lr: float = 0.05, beta1: float = 0.5, beta2: float = 0.99, eps: float = 0.001) -> Transform:
    """m ← β₁ m + (1 - β₁) Δ; v ← β₂ v + (1 - β₂) Δ²; the update is lr · m̂ / (√v̂ + ε), as torch.optim.Adam writes it.

    m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ) in round t. With ε far above the movements it is `nesterov` without momentum
    at lr / ε, where β₁ = 0. So ε says which movements count as small: below it a movement keeps its size, above it each
    element moves by about lr a round, for small and large movements alike. Memory: m and v.

    Source: S. Reddi et al., "Adaptive federated optimization", 2021, FedAdam; its defaults for β₂ and ε. Deviations: m
    and v are corrected for their first rounds; β₁ is 0.5 in place of 0.9, as the outer momentum of `diloco`.
    """
    if not (lr > 0 and eps > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            "the outer Adam needs lr and eps over 0, and beta1 and beta2 in [0, 1), "
            f"got {lr}, {eps}, {beta1} and {beta2}"
        )

    def step(moved: Tensor, state: OuterState) -> tuple[Tensor, Tensor, Tensor | None]:
        assert state.second is not None, "Adam has two moments"
        first = state.first.flat.lerp(moved, 1 - beta1)
        second = (beta2 * state.second.flat).addcmul_(moved, moved, value=1 - beta2)
        size = (second / (1 - beta2**state.round)).sqrt_().add_(eps)
        return first / size * (lr / (1 - beta1**state.round)), first, second

    made = _stepping(call_name(adam, locals()), step, tensors=2)
    return made._replace(at_server=UpdateRule("adam", lr, betas=(beta1, beta2), eps=eps))


def schedule_free(lr: float = 1.0, beta: float = 0.9) -> Transform:
    """z ← z - lr · Δ; x ← (1 - c) x + c z, c = 1/t in round t; the next round begins at y = (1 - β) z + β x.

    Δ is counted from y, the anchor. x is the mean of all z, so steps may stay long without a schedule of rates. With
    β = 0 it is `nesterov` without momentum, at lr. A movement that repeats brings y forward by 1 - β/2 times lr a
    round, 0.55 by the default.

    Memory: u = x - z, because y - z = β u and the update is lr · Δ - β (u_t - u_{t-1}), where
    u_t = (1 - c) (u_{t-1} + lr · Δ). Models are evaluated and saved at y, by default a tenth of the way from x to z.

    Source: A. Defazio et al., "The road less scheduled", 2024, equations 3 to 5, with the movement of a round as the
    gradient. Deviation: it evaluates x.
    """
    if not lr > 0 or not 0 <= beta < 1:
        raise ValueError(f"schedule-free outer steps need lr > 0 and beta in [0, 1), got {lr} and {beta}")

    def step(moved: Tensor, state: OuterState) -> tuple[Tensor, Tensor, None]:
        before, way = state.first.flat, lr * moved
        apart = (before + way) * (1 - 1 / state.round)
        return way - beta * (apart - before), apart, None

    return _stepping(call_name(schedule_free, locals()), step)


def delayed_nesterov(
    lr: float = 0.7, momentum: float = 0.5, momentum_every: int = 4, immediate: float = 0.0
) -> Transform:
    """The update is lr · (Δ + c μ v) / N; in each N-th round lr · (Δ / N + (1 - c (N - 1) / N) μ v), with a new v.

    v ← μ v + (the mean of N rounds' Δ) in each N-th round, N = `momentum_every`; c = `immediate`, from 0 to 1, is the
    part of the momentum that rounds between take in advance. With c = 0, N rounds move by one step of `nesterov` on
    their mean, to rounding; with N = 1 it is `nesterov`. Memory: v, and the sum of movements.

    Source: B. Liu et al., "Asynchronous local-SGD training for language modeling", 2024, delayed Nesterov; its c is
    c / N here. There each push of a worker counts; here the mean of a round does.
    """
    if not (lr > 0 and 0 <= momentum < 1 and momentum_every >= 1 and 0 <= immediate <= 1):
        raise ValueError(
            "delayed Nesterov needs lr > 0, momentum in [0, 1), momentum_every >= 1 and immediate in [0, 1], "
            f"got {lr}, {momentum}, {momentum_every} and {immediate}"
        )
    part = immediate / momentum_every

    def step(moved: Tensor, state: OuterState) -> tuple[Tensor, Tensor, Tensor | None]:
        assert state.second is not None, "it has a momentum and a sum"
        total, velocity = state.second.flat + moved, state.first.flat
        if state.round % momentum_every:
            return lr * (moved / momentum_every + part * momentum * velocity), velocity, total
        velocity = momentum * velocity + total / momentum_every
        taken = 1 - part * (momentum_every - 1)
        return lr * (moved / momentum_every + taken * momentum * velocity), velocity, torch.zeros_like(total)

    return _stepping(call_name(delayed_nesterov, locals()), step, tensors=2)


_Step = Callable[[Tensor, OuterState], tuple[Tensor, Tensor, Tensor | None]]


def _stepping(name: str, step: _Step, tensors: int = 1) -> Transform:
    """A transform of movements: `step` answers with the update and the next tensors of the state."""

    def init(parameters: Bundle) -> OuterState:
        zeros = [parameters.map(lambda flat: flat.new_zeros(flat.shape)) for _ in range(tensors)]
        return OuterState(0, *zeros)

    async def apply(port: Port, bundle: Bundle, state: OuterState) -> tuple[Bundle | None, OuterState]:
        state = state._replace(round=state.round + 1)
        update, first, second = step(bundle.flat, state)
        kept = None if second is None else bundle.with_flat(second)
        return bundle.with_flat(update), OuterState(state.round, bundle.with_flat(first), kept)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost(memory_bytes=tensors * num_bytes(parameters))

    return Transform(init, apply, Promise.SEPARABLE | Promise.WEIGHS, cost, name=name)
