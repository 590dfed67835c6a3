"""Which codecs a parameter server can use: refused when the strategy is built, with the remedy."""

from __future__ import annotations

from math import inf

import torch

from polytempo.core import Codec

_LARGE = torch.empty(1024, 1024, device="meta")
"""A tensor on which a law has to hold: codecs are chosen before there is a model."""
_LOSES = 0.1
"""The largest part of the squared norm: a model works with an error of some per cent, not of one half."""


def check_push_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec whose wires do not say all: a shard knows nothing but what is in the message."""
    if codec is not None and codec.facts.sparse and codec.facts.summable:
        raise ValueError(
            f"{codec.facts.name} wires leave out which entries they hold, for all ranks draw the same in the same "
            "step, and workers of a parameter server are at different steps; use top_k(ratio), whose wires say it"
        )


def check_pull_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec that leaves weights out, changes them much, or keeps a state: all are pulled."""
    if codec is None:
        return
    fit = "bf16(), fp16(), int8() or dynamic8()"
    if codec.facts.memory != "none":
        raise ValueError(
            f"pull_codec={codec.facts.name} keeps a residual for one receiver, and a shard sends the same weights to "
            f"every worker that pulls; use {fit}, without feedback"
        )
    if codec.facts.sparse:
        raise ValueError(
            f"pull_codec={codec.facts.name} does not keep every weight, and no later pull brings what one leaves out; "
            f"use {fit}"
        )
    loses = _loses(codec)
    if loses == inf:
        raise ValueError(f"pull_codec={codec.facts.name} promises nothing of a weight's size; use {fit}")
    if loses > _LOSES:
        raise ValueError(
            f"pull_codec={codec.facts.name} may change the weights of a large tensor by {loses:.1%} of their squared "
            f"norm, where {_LOSES:.0%} is the most that a model can bear; use a finer one, or {fit}"
        )


def _loses(codec: Codec) -> float:
    """The most of a large tensor's squared norm that its error may have: all, where the law promises nothing."""
    law = codec.facts.law
    match law.kind:
        case "lossless":
            return 0.0
        case "contraction":
            return 1.0 - law.bound(_LARGE)
        case "unbiased":
            return law.bound(_LARGE)
    return max(1.0, law.bound(_LARGE))
