"""Binomial tree: reduce to a root, then broadcast; few steps, so small buffers like it.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", 2005; as "reduction tree" in F. Iandola et al., "FireCaffe", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polytempo.core import Port, Price, Work
from polytempo.core.arithmetic.addition import add_

_MOST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 16
"""Of a buffer on its way down."""


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
    """In how many messages such a buffer goes down."""
    return max(1, -(-numel // _piece_numel(numel, itemsize)))


def tree_price(num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> Price:
    """⌈log₂N⌉ rounds of K bytes up, as many down: exact where N is a power of two.

    Otherwise an upper bound: ranks without a partner in a round go ahead, which can hide latencies, never bytes.
    """
    rounds = (num_ranks - 1).bit_length()
    return Price(2 * rounds, rounds * num_bytes, 2 * rounds * (latency_s + num_bytes / bytes_per_s))
