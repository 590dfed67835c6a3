"""Staleness-aware asynchronous SGD: a gradient that is τ updates old has 1/τ of the learning rate."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness
from polytempo.server.rules.asynchronous import on_arrival, softsync
from polytempo.server.rules.staleness import scale_of
from polytempo.server.service import served


def staleness_aware(
    n: int | None = None,
    shards: int = 1,
    replicas: int = 0,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    scale: str | Staleness = "inverse",
) -> Strategy:
    """Every worker pulls, computes, pushes; θ ← θ - (1/c) Σ (η/τᵢ) gᵢ, c = ⌊λ/n⌋; η where τᵢ = 0.

    Without `n` every gradient is an update (n = λ), where it matters most: a learning rate that synchronous SGD just
    bears goes on working with many workers.

    The formula is plain SGD's. For every optimizer of the job, 1/τᵢ divides the learning rate and not the gradient, for
    Adam and Adagrad would cancel a constant factor of that. An update is one step on ḡ with the rate η̄, which its
    weight decay has, too:

        η̄ = (1/c) Σ η/τᵢ        ḡ = Σ (gᵢ/τᵢ) / Σ (1/τᵢ)

    Under a schedule ηᵢ is the rate at the batch that gᵢ is of, and ḡ = Σ (ηᵢ/τᵢ) gᵢ / Σ ηᵢ/τᵢ.

    With momentum take a smaller rate than synchronous SGD's: a gradient that is not stale steps with the whole η, and
    with it goes the history that stale ones built up.

    `scale` is another factor s(τ) in place of 1/τ: `pt.power(2)` is 1/τ². The job's rate is not changed
    otherwise.

    `codec` encodes pushes, and `pull_codec` pulls, as in `downpour`.

    Cost: as `softsync`.

    Source: W. Zhang, S. Gupta, X. Lian and J. Liu, "Staleness-aware async-SGD for distributed deep learning", IJCAI
    2016, section 3.
    """
    return served(
        call_name(staleness_aware, locals(), brief=(*BRIEF, "scale")),
        Service(
            on_arrival(scale_of(scale)) if n is None else softsync(n, scale_of(scale)),
            shards=shards,
            replicas=replicas,
            codec=codec,
            pull_codec=pull_codec,
        ),
    )
