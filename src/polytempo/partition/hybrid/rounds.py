"""In how many rounds, and of which samples, ranks exchange what a divided layer is given. Pure arithmetic.

    joined   one round    every rank sends all of its samples to all others
    turns    N rounds     in round k rank k sends all of its samples
    slices   N rounds     in each round every rank sends an N-th of its samples

All send the same bytes, and compute the same. Rounds overlap: the next one's samples travel while the layer computes
with these. With "turns" one rank's link carries a round, with "slices" all ranks' links do.

Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: the schemes (a), (b) and
(c) of its section 3.1. There a round goes on through all fully connected layers, which saves memory; here each layer
has rounds of its own, so that what lies between layers may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Exchange = Literal["joined", "turns", "slices"]
EXCHANGES: tuple[Exchange, ...] = ("joined", "turns", "slices")
Spans = list[tuple[int, int]]
"""Of each rank, where its samples of a round begin and end among its own."""


def rounds(exchange: Exchange, samples: Sequence[int]) -> list[Spans]:
    """The rounds, where rank r has `samples[r]`. Each sample is in one of them."""
    num_ranks = len(samples)
    if exchange == "joined":
        return [[(0, size) for size in samples]]
    if exchange == "turns":
        return [[(0, size if rank == turn else 0) for rank, size in enumerate(samples)] for turn in range(num_ranks)]
    return [[(size * k // num_ranks, size * (k + 1) // num_ranks) for size in samples] for k in range(num_ranks)]
