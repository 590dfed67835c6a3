"""Star: every rank sends to one root, which adds and sends back. The single parameter server.

Source: the parameter-server side of F. Iandola et al., "FireCaffe", 2016, section 4.
"""

from __future__ import annotations

from torch import Tensor

from polytempo.core import Port, Price
from polytempo.core.arithmetic.addition import add_


async def star(port: Port, buffer: Tensor) -> Tensor:
    """The sum of all ranks' buffers, added at rank 0 in the order of ranks.

    Cost: 2 steps, but the root receives and sends (N-1)·K bytes through one link: time
    2α + 2(N-1)·K/B. Every other rank sends K.
    """
    if buffer.is_meta and await port.whole_sum(star, buffer):
        return buffer
    if port.rank:
        return buffer.copy_(await port.send_receive(buffer, 0, like=buffer, source=0))
    for source in range(1, port.size):
        add_(buffer, await port.recv(buffer, source))
    sending = [await port.start(port.send(buffer, to)) for to in range(1, port.size)]
    for work in sending:
        await work
    return buffer


def star_price(num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> Price:
    """(N-1)·K through the root's link in each direction."""
    through_root = (num_ranks - 1) * num_bytes
    if num_ranks == 1:
        return Price(0, 0.0, 0.0)
    return Price(2, through_root, 2 * latency_s + 2 * through_root / bytes_per_s)
