"""Staleness-aware asynchronous SGD: a gradient that is τ updates old counts 1/τ."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, spelled
from polytempo.server.codecs import spelled_codecs
from polytempo.server.on_arrival import on_arrival
from polytempo.server.service import served, service
from polytempo.server.softsync import softsync
from polytempo.server.staleness import inverse


def staleness_aware(
    n: int | None = None,
    shards: int = 1,
    replicas: int = 0,
    codec: Codec | None = None,
    pull_codec: Codec | None = None,
) -> Strategy:
    """Every worker pulls, computes, pushes; θ ← θ - (1/c) Σ (η/τᵢ) gᵢ, c = ⌊λ/n⌋; η where τᵢ = 0.

    Each gradient is divided by its own staleness, inside the sum. Without `n` every gradient is an update (n = λ),
    where it matters most: a learning rate that synchronous SGD just bears goes on working with many workers.

    `codec` encodes what is pushed, and `pull_codec` what is pulled, as in `downpour`.

    Cost: as `softsync`.

    Source: W. Zhang, S. Gupta, X. Lian and J. Liu, "Staleness-aware async-SGD for distributed deep learning", IJCAI
    2016, section 3.
    """
    return served(
        spelled("staleness_aware", n=n, shards=shards, replicas=replicas, **spelled_codecs(codec, pull_codec)),
        service(
            on_arrival(inverse) if n is None else softsync(n, inverse),
            shards=shards,
            replicas=replicas,
            codec=codec,
            pull_codec=pull_codec,
        ),
    )
