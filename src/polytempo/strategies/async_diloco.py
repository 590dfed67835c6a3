"""Asynchronous DiLoCo: each worker steps alone for H steps, and the server steps by its movement as it arrives."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, Transform, call_name, identity
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness
from polytempo.server.rules.asynchronous import in_shares
from polytempo.server.rules.staleness import scale_of
from polytempo.server.service import outer_rule, served
from polytempo.server.worker.transforms import push_movement


def async_diloco(
    period: int = 10,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.0,
    shards: int = 1,
    replicas: int = 0,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    scale: str | Staleness = "constant",
    momentum_every: int = 1,
    delay: int = 0,
    outer_optimizer: Transform | None = None,
) -> Strategy:
    """DiLoCo without a meeting: a worker pushes its movement of `period` steps, and continues from the server's model.

    Δ = φᵢ - θᵢ, φᵢ the model that worker i pulled last. At the server v ← μv + Δ; φ ← φ - s(τ) α/λ (Δ + μv), with
    α = `outer_lr`, μ = `outer_momentum`, λ workers and s = `scale`, a function of Δ's age τ in updates, as in
    `async_sgd`: "constant", "inverse", `power(0.5)` or `gate(0.1, 8)`. A movement with s(τ) = 0 is dropped: φ and v
    stay, its samples count as dropped, and its worker goes on from φ. One worker is `diloco`. λ pushes move φ as far as
    one step of `diloco` by their mean, so both take the same α; α for each push would be λ times as far.
    Movements of other workers arrive meanwhile, which acts as momentum: take a smaller μ than in `diloco`, or delay it.

    `momentum_every` = N delays the momentum: v changes in every N-th update, and v takes part in these alone,

        updates N, 2N, …    v ← μv + the last N movements;  φ ← φ - s(τ) α/λ (Δ + μv)
        all others          φ ← φ - s(τ) α/λ Δ

    With N = λ each N updates are together one Nesterov step by the mean of their movements.

    `outer_optimizer` makes another step of Δ, at s(τ)/λ of its rate: `adam()`, `heavy_ball()` or `nesterov()` of
    `polytempo.aggregation`, as in `diloco`.

    A worker waits for φ, or with `delay` goes on for so many steps while its movement and φ travel; then θᵢ becomes
    φ + (θᵢ - θᵢ of the push). These steps are a part of the next movement, so each step is in one. Movements are older,
    and norms lose the running statistics of these steps, as they do with the overlap of `downpour`.

    `codec` encodes each movement, `pull_codec` the parameters that come back, as in `downpour`.

    Weight decay and schedule are of the workers' own steps, with the rate at each batch's place in the run; the outer
    step has neither. A worker that dies loses its movement since it last pushed.

    Cost: a movement there and the parameters back, in one of `period` steps of a worker; memory for φᵢ, and with a
    delay for one model more. ValueError for N below 1, for a delay of a period or more, and for an optimizer together
    with a rate or momentum, or that no server has (`schedule_free()`).

    Source: B. Liu, R. Chhaparia, A. Douillard et al., "Asynchronous local-SGD training for language modeling", 2024;
    delayed momentum with c = 0. Deviations: N = 1 by default, plain Nesterov's momentum; each worker has the same H,
    where there slower ones have fewer steps; s(τ) is the paper's 1/√(1 + τ) by `power(0.5)` but for the 1. There all
    workers wait; `delay` is as in `streaming_diloco(blend="keep")`. `adam()` with `gate()` is after V. Shah and J. Sun,
    "Cosine-gated Adam-decay", 2026, where s(τ) multiplies Δ before Adam's moments; here it multiplies the step.
    """
    return served(
        call_name(async_diloco, locals(), brief=(*BRIEF, "scale", "momentum_every", "delay")),
        Service(
            in_shares(scale_of(scale)),
            shards=shards,
            replicas=replicas,
            optimizer=outer_rule(outer_optimizer, outer_lr, outer_momentum, momentum_every),
            codec=codec,
            pull_codec=pull_codec,
        ),
        gradients=identity(),
        parameters=push_movement(period, delay),
    )
