"""n-softsync: the server makes an update of every c = ⌊λ/n⌋ gradients, whoever they are from."""

from __future__ import annotations

from polytempo.core import Strategy, spelled
from polytempo.server.service import choice, served, service
from polytempo.server.softsync import softsync as rule
from polytempo.server.staleness import constant, inverse


def softsync(n: int = 1, shards: int = 1, replicas: int = 0, scale: str = "constant") -> Strategy:
    """Every worker pulls, computes, pushes; θ ← θ - η (1/c) Σ s(τᵢ) gᵢ as soon as c = ⌊λ/n⌋ gradients are there.

    Between synchronous (but n = 1 is not: a fast worker may be in an update twice) and asynchronous (n = λ). The mean
    staleness is (λ - 1)/c, about n. `scale` is s: "constant" (1), or "inverse" (1/τ), which makes it staleness-aware.

    Cost: as `async_sgd`; the optimizer runs once every c gradients.

    Source: S. Gupta, W. Zhang and F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning", 2015,
    section 3 (Rudra). The paper divides the learning rate by the mean staleness; here that is left to you.
    """
    scales = {"constant": constant, "inverse": inverse}
    return served(
        spelled("softsync", n=n, shards=shards, replicas=replicas, scale=scale),
        service(rule(n, choice("scale", scale, scales)), shards=shards, replicas=replicas),
    )
