"""Federated averaging with Yogi at the server."""

from __future__ import annotations

from functools import partial

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds
from polytempo.federated.server_optimizers import AdaptiveServer, yogi


def fed_yogi(
    cohort: int = 10,
    epochs: int = 1,
    batch_size: int | None = 10,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> Strategy:
    """m ← β₁ m + (1 - β₁) Δ; v ← v - (1 - β₂) Δ² sign(v - Δ²); θ ← θ - η m / (√v + τ). Else as `fed_avg`.

    Δ = Σₖ (nₖ / Σ n) (θ - θₖ) is the clients' mean movement, η `server_lr`. v begins at τ², and no bias is taken off.

    Source: S. J. Reddi et al., "Adaptive federated optimization", 2021, Algorithm 2.
    """
    server = partial(AdaptiveServer, second=yogi, lr=server_lr, beta1=beta1, beta2=beta2, tau=tau)
    return in_rounds(call_name(fed_yogi, locals()), cohort, LocalTraining(epochs, batch_size), server=server)
