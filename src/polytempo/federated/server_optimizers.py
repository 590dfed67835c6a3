"""Adaptive optimizers of a server. Its gradient is the clients' mean movement θ - θ_k.

m ← β₁ m + (1 - β₁) Δ        v ← a rule of v and Δ²        θ ← θ - η m / (√v + τ)        Δ = Σ share_k (θ - θ_k)

Source: S. J. Reddi et al., "Adaptive federated optimization", 2021, Algorithm 2. v begins at τ², and no bias is taken
off, which is the difference from torch's Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SecondMoment = Callable[[Tensor, Tensor, float], Tensor]
"""The next v from v, Δ² and β₂."""


class AdaptiveServer(Optimizer):
    """Memory: two tensors for each parameter."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        second: SecondMoment,
        lr: float,
        beta1: float,
        beta2: float,
        tau: float,
    ) -> None:
        if not (lr > 0 and tau > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(
                f"the server needs lr and tau above 0, and betas from 0 to below 1; got {lr}, {tau}, {beta1}, {beta2}"
            )
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau})
        self._second = second

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move by the gradients."""
        for group in self.param_groups:
            beta1, tau = group["beta1"], group["tau"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"] = torch.zeros_like(parameter)
                    state["second"] = torch.full_like(parameter, tau**2)
                state["first"].lerp_(parameter.grad, 1 - beta1)
                state["second"].copy_(self._second(state["second"], parameter.grad.square(), group["beta2"]))
                parameter.addcdiv_(state["first"], state["second"].sqrt() + tau, value=-group["lr"])


def adam(second: Tensor, squared: Tensor, beta2: float) -> Tensor:
    """β₂ v + (1 - β₂) Δ²."""
    return second.lerp(squared, 1 - beta2)


def yogi(second: Tensor, squared: Tensor, beta2: float) -> Tensor:
    """v - (1 - β₂) Δ² sign(v - Δ²)."""
    return second - (1 - beta2) * squared * (second - squared).sign()


def adagrad(second: Tensor, squared: Tensor, beta2: float) -> Tensor:
    """v + Δ²."""
    return second + squared
