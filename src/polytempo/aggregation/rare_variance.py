"""Adam with a second moment that changes rarely, then no more; from then on each rank steps alone.

Source: Y. Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", 2022, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Port, Promise, State, Steps, Transform, averaging, native
from polytempo.core.cost import ever_rarer, num_bytes
from polytempo.core.transform import cost_of


def coded_between(exact: Sequence[Steps]) -> list[Steps]:
    """The other steps up to the last of `exact`, as `ever_rarer` gives them."""
    rare = [steps for steps in exact if steps.period > 1]
    return [Steps(steps.first - steps.period + 1, 1, steps.last, steps.period) for steps in rare]


class RareVarianceState(NamedTuple):
    """Steps so far, steps with an exact exchange, Adam's moments, and the states of the two exchanges."""

    step: int
    updates: int
    first: Bundle
    second: Bundle
    exact: State
    coded: State


def rare_variance(
    last: int,
    repeats: int,
    exact: Transform,
    coded: Transform,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    scale: float = 0.01,
) -> Transform:
    """Adam's step of gradients, met by `coded` or now and then by `exact` up to step T = `last`, then of a rank's own.

        step in exact      g ← exact(g); v ← β₂ v + (1 - β₂) g²       1, 2, 4, … steps apart, `repeats` times each
        others, up to T    g ← r coded(g / r), r = √v̂ + ε             for elements of similar sizes; 0 where v is 0
        later              g is the rank's own
        each step          m ← β₁ m + (1 - β₁) g; the answer is scale · m̂ / (√v̂ + ε), 0 where v is 0

    m̂ = m / (1 - β₁^t), v̂ = v / (1 - β₂^k) after k exact steps. Running statistics meet in steps with an exchange.
    Memory: m and v.
    """
    if last < 1 or repeats < 1:
        raise ValueError(f"the second moment needs at least 1 step, and 1 of each interval; got {last} and {repeats}")
    if not all(0 <= beta < 1 for beta in betas) or not eps > 0 or not scale > 0:
        raise ValueError(f"betas are from 0 to below 1, eps and scale are over 0; got {betas}, {eps} and {scale}")
    exact_steps = ever_rarer(repeats, last=last)

    def init(parameters: Bundle) -> RareVarianceState:
        first, second = (parameters.map(lambda flat: flat.new_zeros(flat.shape)) for _ in range(2))
        return RareVarianceState(0, 0, first, second, exact.init(parameters), coded.init(parameters))

    async def apply(port: Port, bundle: Bundle, state: RareVarianceState) -> tuple[Bundle | None, RareVarianceState]:
        step, (beta1, beta2), updates, second = state.step + 1, betas, state.updates, state.second
        gradient = bundle.flat
        of_exact, of_coded = state.exact, state.coded
        if any(steps.has(step) for steps in exact_steps):
            met, of_exact = await exact.apply(port, bundle, of_exact)
            assert met is not None, "the exact exchange answers in every step"
            gradient, updates = met.flat, updates + 1
            second = bundle.with_flat(second.flat.lerp(gradient.square(), 1 - beta2))
        root = (second.flat / (1 - beta2**updates)).sqrt() + eps
        if step <= last and updates == state.updates:
            met, of_coded = await coded.apply(port, bundle.with_flat(_known(gradient / root, second)), of_coded)
            assert met is not None, "the coded exchange answers in every step"
            gradient = met.flat * root
        first = bundle.with_flat(state.first.flat.lerp(gradient, 1 - beta1))
        direction = first.flat / root * (scale / (1 - beta1**step))
        state = RareVarianceState(step, updates, first, second, of_exact, of_coded)
        return bundle.with_flat(_known(direction, second)), state

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        met = cost_of(exact, parameters, num_ranks).at_each(exact_steps)
        signs = cost_of(coded, parameters, num_ranks).at_each(coded_between(exact_steps))
        return met.plus(signs).remembering(2 * num_bytes(parameters))

    async def beside(port: Port, bundle: Bundle, state: RareVarianceState) -> Bundle:
        return bundle if state.step >= last else await averaging(native)(port, bundle, None)

    promises = exact.promises & coded.promises & (Promise.SEPARABLE | Promise.WEIGHS)
    return Transform(init, apply, promises, cost, beside)


def _known(values: Tensor, second: Bundle) -> Tensor:
    """0 where the second moment is."""
    return torch.where(second.flat > 0, values, torch.zeros_like(values))
