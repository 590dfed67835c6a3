"""Stale synchronous parallel (SSP): asynchronous, but no worker runs away from the slowest."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness
from polytempo.server.rules.asynchronous import within
from polytempo.server.rules.staleness import rate_of, scale_of
from polytempo.server.service import served


def ssp(
    bound: int = 3,
    shards: int = 1,
    replicas: int = 0,
    rate: float | None = None,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    scale: str | Staleness = "constant",
) -> Strategy:
    """Every worker pulls, computes, pushes, as in `async_sgd`; at most `bound` steps ahead of the slowest worker.

    A pull after step c waits until every worker has pushed step c - s (s = `bound`), so the pulled parameters hold all
    gradients up to there. s = 0 is a barrier in every step. A short delay of one worker costs the others nothing.
    `rate` multiplies the job's learning rate, as in `async_sgd`: without it one over the number of workers.
    `scale`: the factor of the rate by the staleness, as in `async_sgd`.

    `codec` encodes pushes, and `pull_codec` pulls, as in `downpour`.

    Cost: as `async_sgd`.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013,
    section 3. There a worker may read an old copy from its cache; here it pulls in every step. There the rate falls
    as 1/√t; here that is left to the job's schedule.
    """
    return served(
        call_name(ssp, locals(), brief=(*BRIEF, "scale")),
        Service(
            within(bound, scale_of(scale)),
            shards=shards,
            replicas=replicas,
            deals="evenly",
            waits=True,
            rate=rate_of(rate, scale=scale),
            codec=codec,
            pull_codec=pull_codec,
        ),
    )
