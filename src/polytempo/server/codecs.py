"""Which codecs a parameter server can use: refused when the strategy is built, with the remedy."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.core import Codec

_KEEPS = 0.9
"""Of the squared norm, at least: the weights of a model bear an error of some per cent, not of one half."""


def check_push_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec whose wires do not say all: a shard knows nothing but what is in the message."""
    if codec is not None and codec.sparse and codec.summable:
        raise ValueError(
            f"{codec.name} wires leave out which entries they hold, for all ranks draw the same in the same step, and "
            "workers of a parameter server are at different steps; use top_k(ratio), whose wires say it"
        )


def check_pull_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec that does not keep every weight, or that remembers: pulls are of whole weights."""
    if codec is None:
        return
    like = torch.empty(()).expand(64, 64)
    remedy = "use bf16(), fp16(), int8() or dynamic8()"
    if codec.init(like) is not None:
        raise ValueError(
            f"pull_codec={codec.name} remembers what it has not sent, and what is pulled are the weights themselves, "
            f"by whoever asks; {remedy}, without feedback"
        )
    law = codec.law
    keeps = law.kind == "lossless" or (law.kind == "contraction" and law.bound(like) >= _KEEPS)
    if codec.sparse or not keeps:
        raise ValueError(
            f"pull_codec={codec.name} does not keep every weight, and what it leaves out of a pull comes with no other "
            f"one; {remedy}"
        )


def spelled_codecs(codec: Codec | None, pull_codec: Codec | None) -> dict[str, Any]:
    """Those that are given, by the names of their arguments: a strategy without them is called as ever."""
    given = {"codec": codec, "pull_codec": pull_codec}
    return {name: value for name, value in given.items() if value is not None}
