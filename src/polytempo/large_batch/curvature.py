"""The Hessian's largest eigenvalue, by power iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.large_batch.points import Loss, LossSurface


class Eigenvalue(NamedTuple):
    """An eigenvalue of the Hessian ∇²f(x) as power iteration has left it."""

    value: float
    """λ = v · ∇²f v, for the unit vector v that was reached."""
    residual: float
    """‖∇²f v - λ v‖: an eigenvalue is no further than this from λ."""
    steps: int
    """Products of the Hessian with a vector that it took."""


def top_eigenvalue(
    loss: Loss, parameters: Sequence[nn.Parameter], *, steps: int = 100, tolerance: float = 1e-2, seed: int = 0
) -> Eigenvalue:
    """The largest eigenvalue of the loss's Hessian: how much the loss bends in the direction in which it bends most.

        v ← ∇²f v / ‖∇²f v‖        from a random v, until ‖∇²f v - λ v‖ ≤ tolerance · |λ|, for so many steps at most

    That finds the eigenvalue λ of largest size. Where it is negative, a second iteration on ∇²f - λ, none of whose
    eigenvalues is negative, finds the largest one. Plain gradient descent on a quadratic diverges at rates above
    2 / λ. Cost: a product with the Hessian takes about two gradients; memory as two gradients of a part of the loss.

    The parameters are afterwards as they were. Errors: ValueError for no step; RuntimeError of torch for a loss that
    cannot be differentiated twice.
    """
    if steps < 1:
        raise ValueError(f"power iteration takes at least one step, got {steps}")
    surface = LossSurface(loss, parameters)
    drawn = torch.Generator().manual_seed(seed)
    with surface.kept() as x:
        begin = torch.randn(x.shape, dtype=torch.float64, generator=drawn)
        found = _largest(lambda v: surface.curvature(x, v), begin, steps, tolerance)
        if found.value >= 0:
            return found
        low = found.value
        shifted = _largest(lambda v: surface.curvature(x, v) - low * v, begin, steps, tolerance)
        return Eigenvalue(shifted.value + low, shifted.residual, found.steps + shifted.steps)


def _largest(times: Callable[[Tensor], Tensor], begin: Tensor, steps: int, tolerance: float) -> Eigenvalue:
    """The eigenvalue of largest size of a symmetric matrix, given as its product with a vector."""
    v = begin / torch.linalg.vector_norm(begin)
    value = residual = 0.0
    for step in range(1, steps + 1):
        product = times(v)
        value = float(v @ product)
        residual = float(torch.linalg.vector_norm(product - value * v))
        length = float(torch.linalg.vector_norm(product))
        if length == 0 or residual <= tolerance * abs(value):
            return Eigenvalue(value, residual, step)
        v = product / length
    return Eigenvalue(value, residual, steps)
