"""Which codecs a parameter server can use: refused when the strategy is built, with the remedy."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from polytempo.core import Codec

_LARGE = torch.empty(1024, 1024, device="meta")
"""A tensor on which a law has to hold: codecs are chosen before there is a model."""
_LOSES = 0.1
"""The largest part of the squared norm: a model works with an error of some per cent, not of one half."""


def check_push_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec whose wires are not complete: a shard has only the message to decode."""
    if codec is not None and codec.sparse and codec.summable:
        raise ValueError(
            f"{codec.name} wires leave out which entries they hold, for all ranks draw the same in the same step, and "
            "workers of a parameter server are at different steps; use top_k(ratio), whose wires say it"
        )


def check_pull_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec that leaves weights out, changes them much, or keeps a state: all are pulled."""
    if codec is None:
        return
    fit = "bf16(), fp16(), int8() or dynamic8()"
    if codec.init(_LARGE) is not None:
        raise ValueError(
            f"pull_codec={codec.name} keeps a residual for one receiver, and a shard sends the same weights to every "
            f"worker that pulls; use {fit}, without feedback"
        )
    if codec.sparse:
        raise ValueError(
            f"pull_codec={codec.name} does not keep every weight, and no later pull brings what one leaves out; "
            f"use {fit}"
        )
    loses = _loses(codec)
    if loses == inf:
        raise ValueError(f"pull_codec={codec.name} has no bound on the error of a weight; use {fit}")
    if loses > _LOSES:
        raise ValueError(
            f"pull_codec={codec.name} may change the weights of a large tensor by {loses:.1%} of their squared "
            f"norm, where {_LOSES:.0%} is the most that a model can bear; use a finer one, or {fit}"
        )


def _loses(codec: Codec) -> float:
    """The largest error on a large tensor, as a part of its squared norm; at least 1 where the law has no bound."""
    law = codec.law
    match law.kind:
        case "lossless":
            return 0.0
        case "contraction":
            return 1.0 - law.bound(_LARGE)
        case "unbiased":
            return law.bound(_LARGE)
    return max(1.0, law.bound(_LARGE))


def spelled_codecs(codec: Codec | None, pull_codec: Codec | None) -> dict[str, Any]:
    """Those that are given, by the names of their arguments: a strategy without them is called as ever."""
    given = {"codec": codec, "pull_codec": pull_codec}
    return {name: value for name, value in given.items() if value is not None}
