"""What passes between the stages of a pipeline, or the parts of a layer, as fewer bytes.

    forward    stage 0 ── activations, 8-bit ──▶ stage 1 ──▶ …
    backward   stage 0 ◀── gradients, 16-bit ─── stage 1 ◀── …

Weights travel likewise. Nothing is remembered from one tensor to the next: they belong to different samples.

Source: Y. Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism", 2019, for what
passes between stages; T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, for 8-bit activations
and gradients between the parts of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.compression.packing import codec_use
from polytempo.core import Codec, EncodeContext, NotFinite, Port
from polytempo.core.codec import check_forgetful


async def send(port: Port, x: Tensor, to: int, codec: Codec, tag: int = 0, *, step: int = 1) -> None:
    """Send x, of any shape, encoded by `codec`, to position `to`; it must stay unchanged until this is finished.

    Cost: `codec.wire_bytes(x)` bytes, nothing besides. `step`: how often this was sent, for codecs that draw (`qsgd`);
    both sides must say the same. As `Port.send`, it may finish only when the receiver asks: two ranks that send to
    each other start this, receive, and then await it.

    Raises ValueError for a codec that remembers something or whose wires vary in length, `NotFinite` for a NaN or an
    infinity that the codec could only hide.
    """
    check_forgetful(codec)
    where = f"what rank {port.rank} sends to rank {to} (tag {tag})"
    wire = await encoded(port, x, codec, _occasion(port.rank, tag, step), where)
    await port.send(wire, to, tag)


async def recv(port: Port, like: Tensor, source: int, codec: Codec, tag: int = 0, *, step: int = 1) -> Tensor:
    """What position `source` sent by `send`: a tensor of `like`'s shape, dtype and device, in memory of its own.

    Raises ValueError as `send`.
    """
    check_forgetful(codec)
    wire = await port.recv(wire_like(codec, like), source, tag)
    return await decoded(port, wire, like, codec, _occasion(source, tag, step))


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
    """What a receiver of the wire of a tensor like this allocates."""
    dtype = codec.wire_dtype(like)
    return torch.empty(codec.wire_bytes(like) // dtype.itemsize, dtype=dtype, device=like.device)


def _occasion(sender: int, tag: int, step: int) -> EncodeContext:
    return EncodeContext(step=step, rank=sender, tensor=tag)
