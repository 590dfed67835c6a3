"""Weights of a few bits, as float32 numbers: a model computes with them, and its masters stay float32.

    forward, backward   Q(w)                     step   w ← w - η ∂L/∂Q(w), the straight-through estimator

Source: the estimator: Y. Bengio, N. Léonard, A. Courville, "Estimating or propagating gradients through stochastic
neurons", 2013; three values: F. Li, B. Liu, "Ternary weight networks", 2016, equations 5 and 6; levels at equal
distances: B. Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only
inference", 2018, here symmetric and for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo.spec.precision import Precision
from polytempo.training.precision.reduced_forward import dtype_of, kept_wide


def kept_float32(model: nn.Module, precision: Precision) -> frozenset[int]:
    """Identities of parameters that stay float32: of norms; of few bits also vectors, such as biases; or all."""
    if precision.is_autocast:
        return frozenset(map(id, model.parameters()))
    vectors = {id(p) for p in model.parameters() if p.dim() < 2} if precision.is_quantised else set()
    return kept_wide(model) | vectors


def lowered(weight: Tensor, precision: Precision) -> Tensor:
    """The weights that forward uses, in memory of their own: 16 bits, or `quantised` in float32."""
    if not precision.is_quantised:
        return weight.to(dtype_of(precision))
    return quantised(weight, precision.bits)


def quantised(weight: Tensor, bits: int) -> Tensor:
    """Q(w), for `weight` of two dims or more, one scale for each row (all but the first dim).

        bits 2      α · sign(w) where |w| > Δ, else 0; Δ = 0.7 · mean |w|, α = mean of the |w| above Δ
        bits > 2    s · round(w / s), s = max |w| / (2^(bits - 1) - 1): |Q(w) - w| ≤ s / 2

    A row of zeros stays. Cost: a few passes over the weights.
    """
    rows = weight.reshape(weight.shape[0], -1)
    magnitudes = rows.abs()
    if bits == 2:
        above = magnitudes > 0.7 * magnitudes.mean(dim=1, keepdim=True)
        level = (magnitudes * above).sum(dim=1, keepdim=True) / above.sum(dim=1, keepdim=True).clamp(min=1)
        return (level * rows.sign() * above).view(weight.shape)
    step = magnitudes.amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (rows / step).round() * step, rows).view(weight.shape)
