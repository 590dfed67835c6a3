"""Corrections of a gradient before it is added: clipping, and compensation of its delay."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core.call_name import call_name
from polytempo.core.rule import Modified


def clip(norm: float) -> Modified:
    """g · min(1, norm/‖g‖), ‖g‖ the Euclidean norm of the gradient's part that lies in the shard.

    With one shard it is the usual clipping by the global norm. With S shards each clips its own part, and the whole
    gradient has a norm of at most norm·√S.
    """
    if not norm > 0:
        raise ValueError(f"clip needs norm > 0, got {norm}")

    def apply(gradient: Tensor, weights: Tensor, basis: Tensor | None) -> Tensor:
        length = float(torch.linalg.vector_norm(gradient))
        return gradient * (norm / length) if length > norm else gradient

    return Modified(call_name(clip, locals()), apply)


def compensate(strength: float) -> Modified:
    """DC-ASGD: g + λ g⊙g⊙(θ - θ_basis), λ = `strength`: about the gradient that θ as it is now would have given.

    g⊙g stands in for the diagonal of the Hessian in the first term of a Taylor series. Cost: the shard keeps the
    weights that each worker read last.

    Source: S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, equation
    10 (DC-ASGD-c, constant λ). The adaptive form, which divides λ by a running mean square of g, is left out: it
    needs a state, and modifiers have none.
    """
    if strength < 0:
        raise ValueError(f"compensate needs strength >= 0, got {strength}")

    def apply(gradient: Tensor, weights: Tensor, basis: Tensor | None) -> Tensor:
        assert basis is not None  # because of needs_basis
        return torch.addcmul(gradient, gradient.square(), weights - basis, value=strength)

    return Modified(call_name(compensate, locals()), apply, needs_basis=True)
