"""Sending to one rank while receiving from another, which MPI calls sendrecv."""

from __future__ import annotations

from torch import Tensor

from polytempo.core.port import Port


async def send_recv(port: Port, buffer: Tensor, to: int, *, like: Tensor, source: int) -> Tensor:
    """Send `buffer` to position `to`, and answer with a tensor shaped like `like` from position `source`.

    The receive is posted before the send. A transport may move a message only when its receiver has asked for it, so
    ranks that all send first wait for each other, and full-duplex links carry one direction after the other.
    Cost: one step; memory for what arrives.
    """
    coming = await port.start(port.recv(like, source))
    going = await port.start(port.send(buffer, to))
    arrived = await coming
    await going
    return arrived
