"""LAMB: Adam whose step in every layer is as long as a fixed part of the layer's own norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.large_batch.layer_wise import LayerKernels, LayerWise, adapts, check_numbers, norms_of, trust_ratio


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

    def descend(self, w: nn.Parameter, g: Tensor, group: dict[str, Any], kernels: LayerKernels) -> None:
        """See `LayerWise`."""
        (m, v), (beta1, beta2), decay = self._moments(w), group["betas"], _decay(w, group)
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": decay, "step": self._counted(w)}
        u, of_w, of_u = kernels.lamb_(w, g, m, v, **numbers)
        w.sub_(u, alpha=group["lr"] * (trust_ratio(of_w, of_u) if adapts(w, group) else 1.0))

    def descend_together(self, ws: list[nn.Parameter], gs: list[Tensor], group: dict[str, Any]) -> None:
        """See `LayerWise`."""
        ms, vs = (list(each) for each in zip(*map(self._moments, ws), strict=True))
        steps, (beta1, beta2) = [self._counted(w) for w in ws], group["betas"]
        torch._foreach_lerp_(ms, gs, 1 - beta1)
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
        roots = torch._foreach_div(vs, [1 - beta2**t for t in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(roots, [1 - beta1**t for t in steps])
        us = torch._foreach_div(ms, roots)
        values = list[Tensor](ws)
        torch._foreach_add_(us, torch._foreach_mul(values, [_decay(w, group) for w in ws]))
        ratios = map(trust_ratio, norms_of(values), norms_of(us))
        rates = [-group["lr"] * (ratio if adapts(w, group) else 1.0) for w, ratio in zip(ws, ratios, strict=True)]
        torch._foreach_mul_(us, rates)
        torch._foreach_add_(values, us)

    def _moments(self, w: nn.Parameter) -> list[Tensor]:
        return self.kept(w, "exp_avg", "exp_avg_sq")

    def _counted(self, w: nn.Parameter) -> int:
        """The number of this step of a tensor, from 1."""
        state = self.state[w]
        if "step" not in state:
            state["step"] = torch.zeros(())
        return int(state["step"].add_(1))


def _decay(w: nn.Parameter, group: dict[str, Any]) -> float:
    return float(group["weight_decay"]) if adapts(w, group) else 0.0
