"""Corrections of a gradient before it is added: clipping, and compensation of its delay."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Modified


def clip(norm: float) -> Modified:
    """g · min(1, norm/‖g‖), ‖g‖ the Euclidean norm of the gradient's part in the shard.

    With one shard it is the usual clipping by the global norm. With S shards each clips its own part, and the whole
    gradient has a norm of at most norm·√S.
    """
    if not norm > 0:
        raise ValueError(f"clip needs norm > 0, got {norm}")

    def apply(gradient: Tensor, weights: Tensor, basis: Tensor | None) -> Tensor:
        length = float(torch.linalg.vector_norm(gradient))
        return gradient * (norm / length) if length > norm else gradient

    return Modified(call_name(clip, locals()), apply)


_TINY = 1e-7
"""The paper's ε, for a parameter that never had a gradient."""


def compensate(strength: float, mean_square: float | None = None) -> Modified:
    """DC-ASGD: g + λ g⊙g⊙(θ - θ_basis), λ = `strength`: about the gradient that θ as it is now would have given.

    With `mean_square` m (DC-ASGD-a) λ is divided by √(v + 10⁻⁷), element by element, v ← m v + (1 - m) g⊙g, which the
    shard keeps.

    g⊙g stands in for the diagonal of the Hessian in the first term of a Taylor series. Cost: the shard keeps the
    weights that each worker read last.

    Source: S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, equations
    10 (DC-ASGD-c, constant λ) and 14 (DC-ASGD-a).
    """
    if strength < 0:
        raise ValueError(f"compensate needs strength >= 0, got {strength}")
    if mean_square is not None and not 0 <= mean_square < 1:
        raise ValueError(f"compensate needs 0 <= mean_square < 1, got {mean_square}")

    def apply(gradient: Tensor, weights: Tensor, basis: Tensor | None) -> Tensor:
        assert basis is not None  # because of needs_basis
        return torch.addcmul(gradient, gradient.square(), weights - basis, value=strength)

    def adapt(gradient: Tensor, weights: Tensor, basis: Tensor | None, squares: Tensor) -> Tensor:
        assert basis is not None
        assert mean_square is not None
        squares.mul_(mean_square).addcmul_(gradient, gradient, value=1 - mean_square)
        moved = (weights - basis).div_(squares.add(_TINY).sqrt_())
        return torch.addcmul(gradient, gradient.square(), moved, value=strength)

    name = call_name(compensate, locals(), brief=("mean_square",))
    remembers = mean_square is not None
    return Modified(name, adapt if remembers else apply, needs_basis=True, remembers=remembers)
