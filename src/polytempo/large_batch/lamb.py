"""LAMB: Adam whose step in every layer is as long as a fixed part of the layer's own norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.large_batch.layer_wise import LayerKernels, LayerWise, adapts, check_numbers, trust_ratio


class LAMB(LayerWise):
    """Layer-wise adaptive moments, for large batches with Adam.

        m ← β₁ m + (1 - β₁) g            m̂ = m / (1 - β₁ᵗ)
        v ← β₂ v + (1 - β₂) g²           v̂ = v / (1 - β₂ᵗ)
        u = m̂ / (√v̂ + ε) + λ w           w ← w - γ ‖w‖ / ‖u‖ · u

    for every parameter tensor w by itself, with its gradient g, learning rate γ and weight decay λ. The ratio is 1
    where ‖w‖ or ‖u‖ is 0. Tensors of one dimension or none (biases, gains of norms) are stepped as by Adam, with ratio
    1 and λ = 0, unless their parameter group says `adapts=True`; False is for all of a group.

    Deviation: the paper's φ(‖w‖), a norm within bounds that it leaves open, is ‖w‖, as in its experiments.

    State: m and v, each as large as the parameters. Cost: a pass over all that also sums the squares,
    another one over w and u, and memory for the largest u.
    Errors: ValueError for a number out of its range; RuntimeError for a sparse gradient.
    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapts: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are at least 0 and below 1, got {betas}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": adapts}
        super().__init__(params, options, fused=fused)

    def descend(self, w: nn.Parameter, g: Tensor, group: dict[str, Any], kernels: LayerKernels | None) -> None:
        """One tensor's step."""
        m, v = self.kept(w, "exp_avg", "exp_avg_sq")
        step = self.state[w].setdefault("step", torch.zeros(()))
        step += 1
        (beta1, beta2), eps, t = group["betas"], group["eps"], int(step)
        decay = group["weight_decay"] if adapts(w, group) else 0.0
        if kernels is None:
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            u = m / ((v / (1 - beta2**t)).sqrt_().add_(eps).mul_(1 - beta1**t))
            u.add_(w, alpha=decay)
            of_w, of_u = float(torch.linalg.vector_norm(w)), float(torch.linalg.vector_norm(u))
        else:
            numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay, "step": t}
            u, of_w, of_u = kernels.lamb_(w, g, m, v, **numbers)
        w.sub_(u, alpha=group["lr"] * (trust_ratio(of_w, of_u) if adapts(w, group) else 1.0))
