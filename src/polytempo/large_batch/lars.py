"""LARS: momentum SGD whose step in every layer is as long as a fixed part of the layer's own norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.large_batch.layer_wise import LayerKernels, LayerWise, adapts, check_numbers, norms_of, trust_ratio


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling, for large batches with momentum SGD.

        λ = η ‖w‖ / (‖g‖ + β ‖w‖)        v ← m v + γ λ (g + β w)        w ← w - v

    for every parameter tensor w by itself, with its gradient g, learning rate γ, momentum m, weight decay β and trust
    coefficient η. λ = 1 where ‖w‖ or ‖g‖ is 0. Tensors of one dimension or none (biases, gains of norms) are stepped as
    by SGD, with λ = 1 and β = 0, unless their parameter group says `adapts=True`; False is for all of a group.

    The learning rate stands inside the momentum, as in the paper: under a schedule, earlier steps keep the rate that
    they were made with (`torch.optim.SGD` multiplies afterwards). With `corrects_momentum` they get the present one: v
    is multiplied by m γₜ / γₜ₋₁ in the place of m (P. Goyal et al., 2017, remark 2).

    State: v, as large as the parameters, and with `corrects_momentum` the last rate.
    Cost: two norms and one update a tensor.
    Errors: ValueError for a number out of its range; RuntimeError for a sparse gradient.
    Source: Y. You, I. Gitman and B. Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        adapts: bool | None = None,
        corrects_momentum: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        if trust == 0:
            raise ValueError("trust is 0, and each layer's step would be; give a positive one, such as 0.001")
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapts": adapts}
        super().__init__(params, options | {"corrects_momentum": corrects_momentum}, fused=fused)

    def descend(self, w: nn.Parameter, g: Tensor, group: dict[str, Any], kernels: LayerKernels) -> None:
        """See `LayerWise`."""
        of_w, of_g = kernels.norms(w, g) if adapts(w, group) else (0.0, 0.0)
        rate, decay = _scaled(w, group, of_w, of_g)
        (v,) = self.kept(w, "momentum_buffer")
        numbers = {"lr": 1.0, "momentum": self._momentum(w, group), "weight_decay": rate * decay}
        kernels.update_("sgd", w, g, rate, w.view(-1), v, **numbers)

    def descend_together(self, ws: list[nn.Parameter], gs: list[Tensor], group: dict[str, Any]) -> None:
        """See `LayerWise`."""
        values = list[Tensor](ws)
        each = [_scaled(w, group, *norms) for w, *norms in zip(ws, norms_of(values), norms_of(gs), strict=True)]
        vs = [self.kept(w, "momentum_buffer")[0] for w in ws]
        moved = torch._foreach_add(gs, torch._foreach_mul(values, [decay for _, decay in each]))
        torch._foreach_mul_(moved, [rate for rate, _ in each])
        torch._foreach_mul_(vs, [self._momentum(w, group) for w in ws])
        torch._foreach_add_(vs, moved)
        torch._foreach_sub_(values, vs)

    def _momentum(self, w: nn.Parameter, group: dict[str, Any]) -> float:
        """What v is multiplied by in this step."""
        momentum = float(group["momentum"])
        if not group["corrects_momentum"]:
            return momentum
        now, state = float(group["lr"]), self.state[w]
        before, state["lr"] = state.get("lr", now), now
        return momentum * now / before if before > 0 else momentum


def _scaled(w: nn.Parameter, group: dict[str, Any], of_w: float, of_g: float) -> tuple[float, float]:
    """γλ and β of a tensor, from its norm and that of its gradient."""
    rate = float(group["lr"])
    if not adapts(w, group):
        return rate, 0.0
    decay = float(group["weight_decay"])
    return rate * trust_ratio(of_w * group["trust"], of_g + decay * of_w if of_g > 0 else 0.0), decay
