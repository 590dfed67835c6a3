"""Federated averaging with momentum at the server."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds


def fed_avg_m(
    cohort: int = 10, epochs: int = 1, batch_size: int | None = 10, server_lr: float = 1.0, momentum: float = 0.9
) -> Strategy:
    """v ← β v + Δ; θ ← θ - η v, where Δ = Σₖ (nₖ / Σ n) (θ - θₖ) is the clients' mean movement. Else as `fed_avg`.

    η is `server_lr`, β `momentum`. With η = 1 and β = 0 it is `fed_avg`. A movement that repeats adds up to η / (1 - β)
    times itself: 10 times by the defaults, so give clients a smaller rate.

    Source: T.-M. H. Hsu, H. Qi and M. Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", 2019.
    """
    if not server_lr > 0 or not 0 <= momentum < 1:
        raise ValueError(f"the server needs server_lr > 0 and momentum in [0, 1), got {server_lr} and {momentum}")
    server = partial(SGD, lr=server_lr, momentum=momentum)
    return in_rounds(call_name(fed_avg_m, locals()), cohort, LocalTraining(epochs, batch_size), server=server)
