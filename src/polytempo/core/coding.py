"""Encoding and decoding in a program: the world charges it, and a simulation that only prices does without values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.codec import Codec, EncodeContext
from polytempo.core.errors import NotFinite
from polytempo.core.port import Port


async def encoded(port: Port, x: Tensor, codec: Codec, when: EncodeContext, where: str) -> Tensor:
    """The wire of x. `NotFinite` says `where` it was found."""
    given = x.detach().contiguous()

    def encode() -> Tensor:
        if given.is_meta:  # a simulation that only prices
            return wire_like(codec, given)
        try:
            return codec.encode(given, None, when)[0]
        except NotFinite as error:
            raise NotFinite(error.codec, error.index, error.value, where) from None

    uses = (codec_use("encode", codec, x.numel() * x.element_size()),)
    return await port.compute(encode, codec.facts.flops / 2 * x.numel(), uses=uses)


async def decoded(port: Port, wire: Tensor, like: Tensor, codec: Codec, when: EncodeContext) -> Tensor:
    """x̂, shaped like `like`, in memory of its own."""

    def decode() -> Tensor:
        return like if wire.is_meta else codec.decode(wire, like, when)

    uses = (codec_use("decode", codec, like.numel() * like.element_size()),)
    return await port.compute(decode, codec.facts.flops / 2 * like.numel(), uses=uses)


def wire_like(codec: Codec, like: Tensor) -> Tensor:
    """Memory for the wire of a tensor like this."""
    dtype = codec.wire_dtype(like)
    return torch.empty(codec.wire_bytes(like) // dtype.itemsize, dtype=dtype, device=like.device)


def codec_use(kernel: Literal["encode", "decode"], codec: Codec, num_bytes: int, calls: int = 1) -> KernelUse:
    """The use of encoding or decoding tensors of `num_bytes` in all."""
    return KernelUse(f"{kernel} {codec.facts.name}", calls, num_bytes)
