"""Directions: gradients that are the update itself, for a plain step θ ← θ - η (direction + λ θ) of SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.aggregation.mean import MovingAverageState
from polytempo.core import Bundle, Cost, Exchange, Port, Promise, State, Transform
from polytempo.core.cost import gathered, num_bytes
from polytempo.core.state import wide
from polytempo.core.transform import cost_of


def signs(scale: float) -> Transform:
    """`scale` · sign(x), also with one rank; 0 stays 0."""
    _check_scale(scale)

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        return bundle.map(lambda flat: flat.sign() * scale), state

    promises = Promise.SEPARABLE | Promise.WEIGHS
    return Transform(lambda parameters: None, apply, promises, lambda parameters, num_ranks: Cost())


def _check_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is the size of a direction, a number above 0; got {scale}")


# ---------------------------------------------------------------------- orthogonal momentum

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NEWTON_STEPS = 5


def orthogonal_momentum(momentum: float = 0.95, scale: float = 0.2, but: Sequence[str] = ()) -> Transform:
    """m ← μ m + (1 - μ) g; the answer is `scale` · √max(1, n/m) · NS((1 - μ) g + μ m) for each matrix (n, m) alike on
    all ranks; μ = `momentum`.

    NS comes near the closest matrix with orthonormal rows or columns by five Newton-Schulz steps; singular values end
    near 1. A tensor with more dimensions is the matrix [shape[0], rest]. Tensors with fewer, and tensors with a part of
    `but` in their name, pass through. Ranks share the work: the matrices by size, in turns, each by one rank. All ranks
    get its bits, so the answer does not depend on their number.

    Cost: 5 (4 r² s + 2 r³) operations for r = min(n, m), s = max(n, m), divided over ranks; an all-gather of answers,
    as long as the largest rank's; memory for m. Computed in float32 where tensors have 16 bits.
    """
    _check_scale(scale)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is at least 0 and below 1, got {momentum}")

    def matrices(bundle: Bundle) -> list[str]:
        parts = [name for name, t in bundle.tensors.items() if t.dim() >= 2 and t.numel()]
        return [name for name in parts if not any(each in name for each in but)]

    def owned(bundle: Bundle, num_ranks: int) -> list[list[str]]:
        by_size = sorted(matrices(bundle), key=lambda name: -bundle.tensors[name].numel())
        return [by_size[rank::num_ranks] for rank in range(num_ranks)]

    def length(bundle: Bundle, names: Sequence[str]) -> int:
        return sum(bundle.tensors[name].numel() for name in names)

    def init(parameters: Bundle) -> MovingAverageState:
        chosen = parameters.select(matrices(parameters))
        return MovingAverageState(chosen.map(lambda flat: flat.new_zeros(flat.shape)))

    async def apply(port: Port, bundle: Bundle, state: MovingAverageState) -> tuple[Bundle | None, MovingAverageState]:
        shares = owned(bundle, port.size)
        if not shares[0]:
            return bundle, state
        chosen = bundle.select(state.average.names)
        average = state.average.with_flat(state.average.flat.lerp(chosen.flat, 1 - momentum))
        ahead = average.with_flat(chosen.flat.lerp(average.flat, momentum))

        def work() -> Tensor:
            buffer = ahead.flat.new_zeros(max(length(bundle, each) for each in shares))
            found = [orthogonalised(ahead.views[name], scale).reshape(-1) for name in shares[port.rank]]
            if found:
                torch.cat(found, out=buffer[: length(bundle, shares[port.rank])])
            return buffer

        if port.size == 1:
            parts = [work()]
        else:
            parts = await port.all_gather(await port.compute(work, _flops(bundle, shares[port.rank])))
        out = bundle.with_flat(bundle.flat)
        for names, part in zip(shares, parts, strict=True):
            pieces = part[: length(bundle, names)].split([bundle.tensors[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                out.views[name].copy_(piece.view(out.views[name].shape))
        return out, MovingAverageState(average)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        shares, kept = owned(parameters, num_ranks), num_bytes(parameters.select(matrices(parameters)))
        if num_ranks == 1 or not shares[0]:
            return Cost(memory_bytes=kept)
        itemsize = parameters.tensors[shares[0][0]].element_size()
        sent = gathered(itemsize * max(length(parameters, each) for each in shares), num_ranks)
        flops = max(_flops(parameters, each) for each in shares)
        return Cost((Exchange("all_gather", sent, flops=flops),), kept)

    return Transform(init, apply, Promise.SEPARABLE | Promise.WEIGHS, cost)


def _flops(bundle: Bundle, names: Sequence[str]) -> float:
    total = 0.0
    for name in names:
        tensor = bundle.tensors[name]
        less, more = sorted((tensor.shape[0], tensor.numel() // tensor.shape[0]))
        total += _NEWTON_STEPS * (4.0 * less * less * more + 2.0 * less**3)
    return total


def orthogonalised(tensor: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` · √max(1, n/m) · NS of a tensor as a matrix (n, m), in its shape; zeros stay zeros."""
    matrix = tensor.reshape(tensor.shape[0], -1).to(wide(tensor.dtype))
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_NEWTON_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = (x.T if rows > columns else x) * (scale * math.sqrt(max(1.0, rows / columns)))
    return found.reshape(tensor.shape).to(tensor.dtype)


# ---------------------------------------------------------------------- Adam with a frozen second moment


class FrozenState(NamedTuple):
    """Steps so far, Adam's moments, and the states of the two exchanges."""

    step: int
    first: Bundle
    second: Bundle
    exact: State
    coded: State


def frozen_adam(
    warmup: int,
    exact: Transform,
    coded: Transform,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    scale: float = 0.01,
) -> Transform:
    """Adam's step of gradients met by `exact` for T = `warmup` steps; then v stays, and `coded` meets first moments.

        steps 1 … T    g ← exact(g); m ← β₁ m + (1 - β₁) g; v ← β₂ v + (1 - β₂) g²
        later          m ← coded(β₁ m + (1 - β₁) gᵢ)
        the answer     scale · m̂ / (√v̂ + ε), m̂ = m / (1 - β₁^t), v̂ = v / (1 - β₂^min(t, T)); 0 where v is 0

    m is the same on all ranks after each step. An element with v = 0 has had no gradient in T steps; a code's error
    there would be divided by ε. Memory: m and v.
    """
    _check_scale(scale)
    if warmup < 1:
        raise ValueError(f"the second moment needs at least 1 step before it is frozen, got warmup={warmup}")
    if not all(0 <= beta < 1 for beta in betas) or not eps > 0:
        raise ValueError(f"betas are at least 0 and below 1, and eps is over 0; got {betas} and {eps}")

    def init(parameters: Bundle) -> FrozenState:
        first, second = (parameters.map(lambda flat: flat.new_zeros(flat.shape)) for _ in range(2))
        return FrozenState(0, first, second, exact.init(parameters), coded.init(parameters))

    async def apply(port: Port, bundle: Bundle, state: FrozenState) -> tuple[Bundle | None, FrozenState]:
        step, (beta1, beta2), second = state.step + 1, betas, state.second
        of_exact, of_coded = state.exact, state.coded
        if step <= warmup:
            met, of_exact = await exact.apply(port, bundle, of_exact)
            assert met is not None, "the exact exchange answers in every step"
            first = bundle.with_flat(state.first.flat.lerp(met.flat, 1 - beta1))
            second = bundle.with_flat(second.flat.lerp(met.flat.square(), 1 - beta2))
        else:
            own = bundle.with_flat(state.first.flat.lerp(bundle.flat, 1 - beta1))
            found, of_coded = await coded.apply(port, own, of_coded)
            assert found is not None, "the coded exchange answers in every step"
            first = bundle.with_flat(found.flat)
        root = (second.flat / (1 - beta2 ** min(step, warmup))).sqrt() + eps
        direction = first.flat / root * (scale / (1 - beta1**step))
        answer = torch.where(second.flat > 0, direction, torch.zeros_like(direction))
        return bundle.with_flat(answer), FrozenState(step, first, second, of_exact, of_coded)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        early = cost_of(exact, parameters, num_ranks).at(lambda steps: steps.until(warmup))
        late = cost_of(coded, parameters, num_ranks).at(lambda steps: steps.after(warmup))
        return early.plus(late).remembering(2 * num_bytes(parameters))

    return Transform(init, apply, exact.promises & coded.promises & (Promise.SEPARABLE | Promise.WEIGHS), cost)
