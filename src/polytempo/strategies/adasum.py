"""Adasum: parallel parts are averaged, orthogonal parts are added."""

from __future__ import annotations

from typing import Literal

from torch.optim import SGD, Optimizer

from polytempo import aggregation
from polytempo.core import Strategy, call_name


def adasum(of: Literal["gradients", "updates"] | None = None) -> Strategy:
    """Merge gradients, or the optimizers' updates, by the adaptive sum, layer by layer.

    a ⊕ b = (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, pairwise over a binary tree of workers, so the learning rate need
    not be scaled with the number of workers.

    `of="gradients"`: g ← g₁ ⊕ … ⊕ g_N; weight decay, momentum and schedule act once, on the merged gradient. The length
    of a ⊕ b matters, and only an optimizer with a step linear in the gradient preserves it. So this is for SGD, with
    momentum or without; others divide by the gradients' size, and are refused (ValueError). `of="updates"`: Δᵢ = θ -
    θᵢ, where θᵢ is worker i's model after its optimizer's step from θ; θ ← θ - (Δ₁ ⊕ … ⊕ Δ_N). For any optimizer.
    Weight decay is part of Δᵢ and merged with the rest; momentum and other state stay with the worker. Under SGD
    without either it is the same as merging gradients, to rounding. Without `of`: gradients under SGD, updates under
    any other optimizer.

    With one worker nothing is merged, and nothing is touched.

    Cost: ⌈log₂N⌉ exchanges of the whole gradient, which overlap the backward pass; of updates, after the step, and
    memory for a copy of the parameters.

    Source: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020; updates as in Horovod's
    `DistributedOptimizer(op=Adasum)`. That merges updates under SGD, too.
    """
    if of == "updates":
        return Strategy(call_name(adasum, locals()), parameters=aggregation.from_anchor(aggregation.adasum()))
    if of not in (None, "gradients"):
        raise ValueError(f'of must be "gradients", "updates" or None, got {of!r}')

    def fit(strategy: Strategy, optimizer: Optimizer) -> Strategy:
        if isinstance(optimizer, SGD):
            return strategy
        if of is None:
            return adasum(of="updates")
        raise ValueError(
            f"{strategy} needs an optimizer with a step linear in the gradient, which is SGD, and "
            f"{type(optimizer).__name__} divides by the gradient's size; use adasum(of='updates'), or adasum()"
        )

    return Strategy(call_name(adasum, locals()), gradients=aggregation.adasum(), fit=fit)
