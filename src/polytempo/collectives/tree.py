"""Sums at a root: the binomial tree has few steps, which suits small buffers; the star is a single parameter server.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", 2005;
F. Iandola et al., "FireCaffe", 2016: "reduction tree" and, in section 4, the star.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polytempo.core import Port, Price, Work
from polytempo.core.arithmetic.merge import add_

_MOST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 16
"""Bounds of the pieces of a buffer on its way down."""


async def tree(port: Port, buffer: Tensor) -> Tensor:
    """The sum of all ranks' buffers: `reduce_to_root`, then `broadcast_from_root`.

    Cost: 2⌈log₂N⌉ steps; every rank but the root sends K up, and K down to each child: the root
    sends ⌈log₂N⌉·K. Time 2⌈log₂N⌉(α + K/B).
    """
    coming = await expect_from_root(port, buffer)
    return await broadcast_from_root(port, await reduce_to_root(port, buffer), coming)


async def reduce_to_root(port: Port, buffer: Tensor) -> Tensor:
    """Rank 0 ends with the sum; the others' buffers hold partial sums.

        round 0   1 → 0   3 → 2   5 → 4   7 → 6
        round 1           2 → 0           6 → 4
        round 2                           4 → 0

    Cost: ⌈log₂N⌉ steps, K bytes from every rank but the root.
    """
    distance = 1
    while distance < port.size:
        if port.rank % (2 * distance):
            await port.send(buffer, port.rank - distance)
            break
        if port.rank + distance < port.size:
            add_(buffer, await port.recv(buffer, port.rank + distance))
        distance *= 2
    return buffer


async def expect_from_root(port: Port, buffer: Tensor) -> list[Work[Tensor]]:
    """Post the receives of `broadcast_from_root`, so that they stand before this rank sends anything up.

    Cost: nothing; memory for the buffer that will arrive.
    """
    if port.rank == 0:
        return []
    parent = port.rank - (port.rank & -port.rank)
    return [await port.start(port.recv(piece, parent)) for piece in _pieces(buffer)]


async def broadcast_from_root(port: Port, buffer: Tensor, coming: list[Work[Tensor]]) -> Tensor:
    """Every rank ends with rank 0's buffer: the reduction's tree, downwards. `coming` is of `expect_from_root`.

    A rank hands every piece on as soon as it has it, to the child with the most descendants first. A send is finished
    before its message has arrived, so whole buffers to several children would share the link, and all arrive late.
    Cost: ⌈log₂N⌉ steps, at most ⌈log₂N⌉·K bytes from the root.
    """
    distance = port.rank & -port.rank or 1 << (port.size - 1).bit_length()
    children = [port.rank + (1 << k) for k in reversed(range(distance.bit_length() - 1))]
    sending = []
    for number, piece in enumerate(_pieces(buffer)):
        if coming:
            piece.copy_(await coming[number])
        sending += [await port.start(port.send(piece, child)) for child in children if child < port.size]
    for work in sending:
        await work
    return buffer


def _pieces(buffer: Tensor) -> Sequence[Tensor]:
    """The flat buffer in at most 16 pieces of at least 64 KiB each, but for the last."""
    pieces: Sequence[Tensor] = buffer.split(_piece_numel(buffer.numel(), buffer.element_size()))
    return pieces


def _piece_numel(numel: int, itemsize: int) -> int:
    return max(_LEAST_PIECE_BYTES // itemsize, -(-numel // _MOST_PIECES))


def num_pieces(numel: int, itemsize: int) -> int:
    """The number of messages of such a buffer on its way down."""
    return max(1, -(-numel // _piece_numel(numel, itemsize)))


def tree_price(num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> Price:
    """⌈log₂N⌉ rounds of K bytes up, as many down: exact where N is a power of two.

    Otherwise an upper bound: ranks without a partner in a round go ahead, which can hide latencies, never bytes.
    """
    rounds = (num_ranks - 1).bit_length()
    return Price(2 * rounds, rounds * num_bytes, 2 * rounds * (latency_s + num_bytes / bytes_per_s))


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
