"""Rounds of clients with models and movements of fewer bytes."""

from __future__ import annotations

from dataclasses import replace

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.calls.refusals import refuse
from polytempo.federated.rounds import rounds_of
from polytempo.federated.strategies.fed_avg import fed_avg


def fed_coded(inner: Strategy | None = None, codec: Codec | None = None, pull_codec: Codec | None = None) -> Strategy:
    """`inner` (None: `fed_avg()`), where clients begin with C'(θ) and send C(C'(θ) - θₖ).

        pt.federated.fed_coded(pt.federated.fed_avg(cohort=10), codec=pt.compression.qsgd(levels=127))

    C is `codec`, for a client's movement, C' is `pull_codec`, for the model (None: as it is). Tensors of fewer than
    1,024 elements travel as they are. Codecs that draw do so from (seed of the codec, round, client).

    Errors: `Incompatible` (PT2512) for a codec with memory, such as `feedback(…)`: a client takes part seldom, and its
    rest would belong to an old model.

    Cost: codec.wire_bytes up and pull_codec.wire_bytes down for each client; between workers of this run sums travel
    as in `inner`.

    Source: A. Reisizadeh, A. Mokhtari, H. Hassani, A. Jadbabaie and R. Pedarsani, "FedPAQ: A communication-efficient
    federated learning method with periodic averaging and quantization", 2020, Algorithm 1, for movements.
    """
    inner = fed_avg() if inner is None else inner
    rounds = rounds_of(inner, "fed_coded")
    if codec is not None and rounds.secure is not None:
        reason = "codes of single movements do not add up under masks"
        refuse({"secure sum", "single movements"}, strategy=inner, reason=reason)
    for each in (codec, pull_codec):
        if each is not None and each.facts.memory != "none":
            refuse({"coded rounds", "codec with memory"}, codec=each.facts.name)
    name = call_name(fed_coded, {"inner": inner, "codec": codec, "pull_codec": pull_codec})
    return replace(inner, name=name, meeting=replace(rounds, codec=codec, pull_codec=pull_codec))
