"""Recursive halving and doubling: the ring's bytes in logarithmically many steps.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", 2005; P. Goyal et al., "Accurate, large minibatch SGD", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from polytempo.collectives.ring import IntArray, Round
from polytempo.core import Port, Price
from polytempo.core.arithmetic.merge import add_


async def halving_doubling(port: Port, buffer: Tensor) -> Tensor:
    """The sum of all ranks' flat buffers, for any number of ranks.

    P is the largest power of two ≤ N. The N-P ranks beyond it first give their buffer to rank r-P and
    get the result at the end. Among the P: at distance P/2, P/4, … 1, partners swap halves of their
    rest and add; then the finished pieces are swapped back at distance 1, 2, … P/2.

        halving   0 ⇄ 2 (half)     0 ⇄ 1 (quarter)       rank r ends with piece r
        doubling  0 ⇄ 1 (quarter)  0 ⇄ 2 (half)

    Cost: 2log₂P steps, 2(P-1)/P · K bytes a rank, for K a multiple of P; where N is not a power of two
    two more steps, and K more bytes from each extra rank and from its partner; the partner's link
    also receives the first half-buffer of its pair meanwhile (K/2 more time).
    """
    num_pairs = 1 << (port.size.bit_length() - 1)
    if buffer.is_meta and await port.whole_sum(halving_doubling, buffer):
        return buffer
    if port.rank >= num_pairs:
        partner = port.rank - num_pairs
        return buffer.copy_(await port.send_receive(buffer, partner, like=buffer, source=partner))
    extra = port.rank + num_pairs
    if extra < port.size:
        add_(buffer, await port.recv(buffer, extra))
    await _halve_and_double(port, buffer, num_pairs)
    if extra < port.size:
        await port.send(buffer, extra)
    return buffer


async def _halve_and_double(port: Port, buffer: Tensor, num_ranks: int) -> None:
    held, parents = buffer, []
    distance = num_ranks // 2
    while distance:
        low, high = held.tensor_split(2)
        mine, theirs = (high, low) if port.rank & distance else (low, high)
        parents.append((distance, mine, theirs))
        partner = port.rank ^ distance
        add_(mine, await port.send_receive(theirs, partner, like=mine, source=partner))
        held, distance = mine, distance // 2
    for distance, mine, theirs in reversed(parents):
        partner = port.rank ^ distance
        theirs.copy_(await port.send_receive(mine, partner, like=theirs, source=partner))


def halving_doubling_rounds(num_ranks: int, numel: int) -> Iterator[Round]:
    """Messages of `halving_doubling`, round by round, for a power of two of ranks."""
    ranks, held, kept = np.arange(num_ranks), np.full(num_ranks, numel), list[tuple[int, IntArray]]()
    distance = num_ranks // 2
    while distance:
        upper = ranks & distance > 0
        yield Round(ranks ^ distance, np.where(upper, held - held // 2, held // 2))
        held = np.where(upper, held // 2, held - held // 2)
        kept.append((distance, held))
        distance //= 2
    for distance, held in reversed(kept):
        yield Round(ranks ^ distance, held)


def halving_doubling_price(num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> Price:
    """2log₂P rounds of K/2, K/4, … K/P bytes; where N is not a power of two, two of K and a wait of K/2."""
    power = 1 << (num_ranks.bit_length() - 1)
    extra = power != num_ranks
    swapped = 2 * (power - 1) / power * num_bytes
    steps = 2 * (power.bit_length() - 1) + 2 * extra
    seconds = steps * latency_s + (swapped + 2.5 * extra * num_bytes) / bytes_per_s
    return Price(steps, swapped + extra * num_bytes, seconds)
