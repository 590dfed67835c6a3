"""Ring all-reduce: every link busy all the time, the fewest bytes possible. It is made of rounds, as other routes are.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009; A. Gibiansky, "Bringing HPC techniques to deep learning", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core import Port, Price
from polytempo.core.arithmetic.merge import add_


async def ring(port: Port, buffer: Tensor) -> Tensor:
    """The sum of all ranks' flat buffers; each element is added in the order of the ring.

    The buffer is cut into N chunks with sizes that differ by at most one element. Rank r sends chunk r,
    then always the chunk that it has just added to; after N-1 rounds it holds the finished chunk
    r+1, and N-1 more rounds pass the finished chunks on:

        round     rank 0        rank 1        rank 2
        reduce 0  sends a       sends b       sends c
        reduce 1  sends c+c'    sends a+a'    sends b+b'
        gather 0  sends B       sends C       sends A        (finished chunks in capitals)
        gather 1  sends A       sends B       sends C

    Cost: 2(N-1) steps; 2K - c(r+1) - c(r+2) bytes from rank r, where c(i) is the size of chunk i:
    2(N-1)/N · K where N divides K. Time 2(N-1)(α + K/(N·B)).
    """
    num_ranks, rank = port.size, port.rank
    if num_ranks == 1 or (buffer.is_meta and await port.whole_sum(ring, buffer)):
        return buffer
    chunks = list(buffer.tensor_split(num_ranks))
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for k in range(num_ranks - 1):
        mine = chunks[(rank - k - 1) % num_ranks]
        add_(mine, await port.send_receive(chunks[(rank - k) % num_ranks], after, like=mine, source=before))
    for k in range(num_ranks - 1):
        theirs = chunks[(rank - k) % num_ranks]
        theirs.copy_(await port.send_receive(chunks[(rank + 1 - k) % num_ranks], after, like=theirs, source=before))
    return buffer


def ring_rounds(num_ranks: int, numel: int) -> Iterator[Round]:
    """Messages of `ring`, round by round."""
    ranks = np.arange(num_ranks)
    twice, after = np.tile(stripe_sizes(num_ranks, numel), 2), (ranks + 1) % num_ranks
    for first in (0, 1):  # rank r sends stripe r + first - k
        for k in range(num_ranks - 1):
            begin = (first - k) % num_ranks
            yield Round(after, twice[begin : begin + num_ranks])


def ring_price(num_ranks: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> Price:
    """2(N-1) rounds of K/N bytes."""
    rounds = 2 * (num_ranks - 1)
    chunk = num_bytes / num_ranks
    return Price(rounds, rounds * chunk, rounds * (latency_s + chunk / bytes_per_s))


IntArray = NDArray[np.int64]


class Round(NamedTuple):
    """One message from each rank."""

    to: IntArray
    """The receiver of each rank's message: a permutation of the ranks."""
    numel: IntArray
    """The count of numbers."""


def stripe_sizes(num_ranks: int, numel: int) -> IntArray:
    """The parts of `tensor_split` of `numel` numbers: the first ones are one longer where they do not divide evenly."""
    each, longer = divmod(numel, num_ranks)
    return each + (np.arange(num_ranks) < longer)
