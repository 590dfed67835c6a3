"""Tensors between the stages of a pipeline, or the parts of a layer, as fewer bytes.

    forward    stage 0 ── activations, 8-bit ──▶ stage 1 ──▶ …
    backward   stage 0 ◀── gradients, 16-bit ─── stage 1 ◀── …

Weights travel likewise. Nothing is remembered from one tensor to the next: they belong to different samples.

Source: Y. Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism", 2019, for the
activations and gradients between stages; T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016,
for 8-bit activations and gradients between the parts of a model.
"""

from __future__ import annotations

from torch import Tensor

from polytempo.core import Codec, EncodeContext, Port
from polytempo.core.codec import check_forgetful
from polytempo.core.coding import decoded, encoded, wire_like


async def send(port: Port, x: Tensor, to: int, codec: Codec, tag: int = 0, *, step: int = 1) -> None:
    """Send x, of any shape, encoded by `codec`, to position `to`; it must stay unchanged until this is finished.

    Cost: `codec.wire_bytes(x)` bytes, nothing else. `step`: how often this was sent, for codecs that draw (`qsgd`);
    both sides must say the same. As `Port.send`, it may finish only when the receiver asks: two ranks that send to
    each other start this, receive, and then await it.

    Raises ValueError for a codec with memory or with wires of varying length, `NotFinite` for a NaN or an
    infinity that the codec could only hide.
    """
    check_forgetful(codec)
    where = f"the tensor from rank {port.rank} to rank {to} (tag {tag})"
    wire = await encoded(port, x, codec, _occasion(port.rank, tag, step), where)
    await port.send(wire, to, tag)


async def recv(port: Port, like: Tensor, source: int, codec: Codec, tag: int = 0, *, step: int = 1) -> Tensor:
    """Receive from position `source` and `send`: a tensor of `like`'s shape, dtype and device, in memory of its own.

    Raises ValueError as `send`.
    """
    check_forgetful(codec)
    wire = await port.recv(wire_like(codec, like), source, tag)
    return await decoded(port, wire, like, codec, _occasion(source, tag, step))


def _occasion(sender: int, tag: int, step: int) -> EncodeContext:
    return EncodeContext(step=step, rank=sender, tensor=tag)
