"""n-softsync: the server makes an update of every c = ⌊λ/n⌋ gradients, from whichever workers."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness
from polytempo.server.rules.asynchronous import softsync as rule
from polytempo.server.rules.staleness import rate_of, scale_of
from polytempo.server.service import served


def softsync(
    n: int = 1,
    shards: int = 1,
    replicas: int = 0,
    scale: str | Staleness = "constant",
    rate: float | None = None,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    hierarchical: bool = False,
) -> Strategy:
    """Every worker pulls, computes, pushes; θ ← θ - ρ η (1/c) Σ s(τᵢ) gᵢ as soon as c = ⌊λ/n⌋ gradients are there.

    Between synchronous (but n = 1 is not: a fast worker may be in an update twice) and asynchronous (n = λ). The mean
    staleness is (λ - 1)/c, about n. c is at least 1: with n > λ every gradient is an update, as with n = λ.

    `scale` is s: "constant" (1), "inverse" (1/τ), which makes it staleness-aware, or `pt.power(p)` (1/τᵖ). It
    scales the learning rate, as `staleness_aware` says for optimizers other than plain SGD: a step has the mean of the
    gradients' rates.

    ρ = `rate` multiplies the job's learning rate η. Without it ρ = c/λ, about 1/n, λ the workers that the run starts
    with: a gradient counts as much as in the synchronous step. With "inverse", which looks after that, ρ = 1;
    for other powers see `async_sgd`.

    `codec` encodes pushes, and `pull_codec` pulls, as in `downpour`.

    `hierarchical`: the workers of a host sum their gradients before one of them pushes, as in `async_sgd`. It
    counts as many gradients as it has, so an update may be of a few more than c. Only with `scale="constant"`.

    Cost: as `async_sgd`; the optimizer runs once every c gradients.

    Source: S. Gupta, W. Zhang and F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning", 2015,
    section 3 (Rudra). The paper divides the learning rate by the mean staleness, which is about n.
    """
    return served(
        call_name(softsync, locals()),
        Service(
            rule(n, scale_of(scale)),
            shards=shards,
            replicas=replicas,
            rate=rate_of(rate, lambda workers: max(1, workers // n), scale),
            codec=codec,
            pull_codec=pull_codec,
            hierarchical=hierarchical,
        ),
    )
