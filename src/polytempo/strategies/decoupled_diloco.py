"""Decoupled DiLoCo: the server steps as soon as a quorum of the workers' movements has arrived."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, Transform, call_name, identity
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service
from polytempo.server.rules.synchronous_step import quorum as rule
from polytempo.server.service import outer_rule, served
from polytempo.server.worker.transforms import push_movement


def decoupled_diloco(
    period: int = 10,
    quorum: int = 2,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.0,
    shards: int = 1,
    replicas: int = 0,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    delay: int = 0,
    grace_s: float = 0.0,
    momentum_every: int = 1,
    outer_optimizer: Transform | None = None,
) -> Strategy:
    """DiLoCo of the first workers that come: a slow one, or a dead one, holds up no other.

    A worker pushes Δᵢ = φᵢ - θᵢ after `period` steps, φᵢ the model that it pulled last. When q = `quorum` workers'
    movements are there (fewer, where fewer workers are left), those c that have arrived make one outer step:

        Δ = Σ mᵢ Δᵢ / Σ mᵢ;  v ← μv + Δ;  φ ← φ - (c/λ) α (Δ + μv)          θᵢ ← φ for these c

    with mᵢ the samples behind Δᵢ, λ workers, α = `outer_lr` and μ = `outer_momentum`. With a quorum the server waits
    for up to `grace_s` seconds more, the grace window, unless all workers have come before. A later movement is in a
    later step; none is lost, and λ movements move φ as far as one step of `diloco` in all. q = 1 without a window is
    `async_diloco`, to the bit; q = λ or more waits for all, as `diloco` does, and so does a long enough window. Little
    momentum, for late movements act as momentum.

    `momentum_every` = N delays the momentum to every N-th outer step, by the sum of N steps' Δ, as in `async_diloco`. N
    steps of q movements each are one of all workers for N = λ/q.

    With `delay` a worker goes on meanwhile, and takes φ in so many steps later, as in `async_diloco`. `outer_optimizer`
    makes another step of Δ than Nesterov's, as there, at c/λ of its rate.

    `codec` encodes each movement, `pull_codec` the parameters that come back, as in `downpour`. Weight decay and
    schedule are as in `async_diloco`. A worker that dies loses its movement since it last pushed.

    Cost: a movement there and the parameters back, in one of `period` steps of a worker, which waits for q - 1 others
    unless there is a delay, and the window; memory for φᵢ. ValueError for a quorum below 1, for a delay of a period or
    more, for a negative or infinite window, and for N below 1.

    Source: "Decoupled DiLoCo for resilient distributed pre-training", arXiv 2604.21428, 2026. Deviations: the grace
    window has a fixed length, where the paper's adapts; a shard's first copy times it, and a copy that takes its place
    times it from the beginning; without a delay a worker waits for the step with its movement, where the paper's goes
    on; the whole model at a time and not by fragments, each shard by its own quorum; weights by samples alone, not by
    samples per second, and c/λ of the outer rate.
    """
    return served(
        call_name(decoupled_diloco, locals(), brief=(*BRIEF, "delay", "grace_s", "momentum_every")),
        Service(
            rule(quorum, grace_s),
            shards=shards,
            replicas=replicas,
            waits=quorum > 1 or grace_s > 0,
            optimizer=outer_rule(outer_optimizer, outer_lr, outer_momentum, momentum_every),
            codec=codec,
            pull_codec=pull_codec,
        ),
        gradients=identity(),
        parameters=push_movement(period, delay),
    )
