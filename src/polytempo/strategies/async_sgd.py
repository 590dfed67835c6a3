"""Asynchronous SGD: each gradient updates the server's parameters as it arrives; no worker waits for another."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.rules.staleness import rate_of, scale_of
from polytempo.server.service import served


def async_sgd(
    shards: int = 1,
    replicas: int = 0,
    rate: float | None = None,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    hierarchical: bool = False,
    scale: str | Staleness = "constant",
) -> Strategy:
    """Every worker: pull the parameters, compute a gradient on them, push it; the server applies each push.

    θ ← θ - ρ s(τ) η g(θ_{t-τ}); τ, the updates that came between, has the mean λ - 1 with λ workers of one speed. The
    job's optimizer runs in the shards, and every gradient is a step of it: λ workers make λ steps where synchronous SGD
    makes one. With one worker it is plain SGD, to the bit.

    ρ = `rate` multiplies the job's learning rate η. Without it ρ = 1/λ, λ the workers that the run starts with: a
    gradient counts as much as in the synchronous step, which takes the mean of λ, and the job's η is good for both. The
    paper's rule is `rate=1`. Then give the job a smaller η: staleness acts like momentum, and adds to the job's (I.
    Mitliagkas et al., "Asynchrony begets momentum", 2016). Under a schedule η is the rate at the batch's place in the
    run, whichever worker computes it, and however late. Weight decay goes with each update, at its rate ρ η.

    `scale` is s, the factor of the rate by the staleness: "constant" (1), "inverse" (1/τ, `staleness_aware`), or
    `pt.power(p)` (1/τᵖ). Then ρ without `rate` is the most that moves as far as the synchronous step at the
    usual staleness λ, and at most 1: 1 with "inverse", 1/√λ with `power(0.5)`, 1 with `power(2)`, which moves less.

    `shards` processes hold the parameters in parts; each part has `replicas` further copies.

    `codec` encodes pushes, and `pull_codec` pulls, as in `downpour`.

    `hierarchical`: the workers of a host add up their gradients first, in its memory, and one of them pushes the sum,
    which is one update: θ ← θ - ρ η Σ gᵢ, with the mean of their rates under a schedule. Plain SGD moves as far as by
    single updates; momentum, Adam and Adagrad take the sum for one gradient. Pushes between hosts are divided by the
    workers of a host, which go at the pace of the slowest of them. Not with `codec`, nor with tables of rows,
    nor with another `scale` than "constant".

    Cost: a worker sends its gradient and receives the parameters in every step, one round trip.

    Source: J. Dean et al., "Large scale distributed deep networks", 2012, section 4.1 (Downpour SGD with n_push =
    n_fetch = 1 and no local step).
    """
    return served(
        call_name(async_sgd, locals(), brief=(*BRIEF, "scale")),
        Service(
            on_arrival(scale_of(scale)),
            shards=shards,
            replicas=replicas,
            rate=rate_of(rate, scale=scale),
            codec=codec,
            pull_codec=pull_codec,
            hierarchical=hierarchical,
        ),
    )
