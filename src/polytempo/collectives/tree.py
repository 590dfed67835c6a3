"""Binomial tree: reduce to a root, then broadcast; few steps, so small buffers like it.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", 2005; as "reduction tree" in F. Iandola et al., "FireCaffe", 2016.
"""

from __future__ import annotations

from torch import Tensor

from polytempo.core import Port, Price


async def tree(port: Port, buffer: Tensor) -> Tensor:
    """The sum of all ranks' buffers: `reduce_to_root`, then `broadcast_from_root`.

    Cost: 2⌈log₂N⌉ steps; every rank but the root sends K up, and K down to each child: the root
    sends ⌈log₂N⌉·K. Time 2⌈log₂N⌉(α + K/B).
    """
    return await broadcast_from_root(port, await reduce_to_root(port, buffer))


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
            buffer.add_(await port.recv(buffer, port.rank + distance))
        distance *= 2
    return buffer


async def broadcast_from_root(port: Port, buffer: Tensor) -> Tensor:
    """Every rank ends with rank 0's buffer: the reduction's tree, downwards.

    Cost: ⌈log₂N⌉ steps, at most ⌈log₂N⌉·K bytes from the root.
    """
    distance = 1
    while distance < port.size and not port.rank % (2 * distance):
        distance *= 2
    if port.rank:
        buffer.copy_(await port.recv(buffer, port.rank - distance))
    while distance > 1:
        distance //= 2
        if port.rank + distance < port.size:
            await port.send(buffer, port.rank + distance)
    return buffer


def tree_price(num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> Price:
    """⌈log₂N⌉ rounds of K bytes up, as many down: exact where N is a power of two.

    Otherwise an upper bound: ranks without a partner in a round go ahead, which can hide latencies, never bytes.
    """
    rounds = (num_ranks - 1).bit_length()
    return Price(2 * rounds, rounds * num_bytes, 2 * rounds * (latency_s + num_bytes / bytes_per_s))
