"""Asynchronous DiLoCo: each worker steps alone for H steps, and the server steps by its movement as it arrives."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name, identity
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness, UpdateRule
from polytempo.server.rules.asynchronous import in_shares
from polytempo.server.rules.staleness import scale_of
from polytempo.server.service import served
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
) -> Strategy:
    """DiLoCo without a meeting: a worker pushes its movement of `period` steps, and continues from the server's model.

    Δ = φᵢ - θᵢ, φᵢ the model that worker i pulled last. At the server v ← μv + Δ; φ ← φ - s(τ) α/λ (Δ + μv), with
    α = `outer_lr`, μ = `outer_momentum`, λ workers and s = `scale`, a function of Δ's age τ in updates, as in
    `async_sgd`: "constant", "inverse" or `power(0.5)`. One worker is `diloco`. λ pushes move φ as far as one step of
    `diloco` by their mean, so both take the same α; α for each push would be λ times as far.
    Movements of other workers arrive meanwhile, which acts as momentum: take a smaller μ than in `diloco`.

    `codec` encodes each movement, `pull_codec` the parameters that come back, as in `downpour`.

    Weight decay and schedule are of the workers' own steps, with the rate at each batch's place in the run; the outer
    step has neither. A worker that dies loses its movement since it last pushed.

    Cost: a movement there and the parameters back, in one of `period` steps of a worker, which waits; memory for φᵢ.

    Source: B. Liu, R. Chhaparia, A. Douillard et al., "Asynchronous local-SGD training for language modeling", 2024.
    Deviations: plain Nesterov's momentum in place of a delayed one; each worker has the same H, where there slower ones
    have fewer steps; s(τ) is the paper's 1/√(1 + τ) by `power(0.5)` but for the 1.
    """
    return served(
        call_name(async_diloco, locals(), brief=(*BRIEF, "scale")),
        Service(
            in_shares(scale_of(scale)),
            shards=shards,
            replicas=replicas,
            optimizer=UpdateRule("sgd", outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0),
            codec=codec,
            pull_codec=pull_codec,
        ),
        gradients=identity(),
        parameters=push_movement(period),
    )
