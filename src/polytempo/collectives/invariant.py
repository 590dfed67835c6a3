"""Invariant: a sum with the same bits for any number of ranks, because a tree over slices fixes its order.

    slices      0   1   2   3   4   5   6   7            invariant(slices=8)
                └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘
                  └───┬───┘       └───┬───┘              every + is the same + of the same two numbers,
                      └───────┬───────┘                  whichever ranks hold them
    2 ranks     0   0   0   0   1   1   1   1
    3 ranks     0   0   1   1   2   2   2   2
    4 ranks     0   0   1   1   2   2   3   3

Why a tree and no exact accumulator: floating-point addition is commutative, so a fixed tree fixes the bits, in any
dtype, for the ring's bytes. Accumulators that are exact in any order take two to four times the bytes, or a round that
agrees on a scale; and slices are needed all the same, because a kernel rounds by the shape of its batch.

Source: P. Ahrens, H. D. Nguyen and J. Demmel, "Efficient reproducible floating point summation and BLAS", 2016, for
sums with the same bits in any order, by accumulators; the tree is this library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from polytempo.collectives.ring import Round, stripe_sizes
from polytempo.core import Port, Route, call_name
from polytempo.core.arithmetic.slice_tree import along_tree
from polytempo.core.calls.typed_arguments import check_whole


def invariant(slices: int = 8) -> Route:
    """The route of `sync_sgd` for weights with the same bits for 1, 2, … `slices` workers.

    The global batch is cut into `slices` slices, each slice's gradient is computed separately, and a binary tree over
    slice numbers fixes the order of additions. Each rank has the slices of one subtree: with N ranks the
    busiest has slices / 2^⌊log₂N⌋ of them, so powers of two divide the work evenly.

    The route itself adds the ranks' subtrees: rank r gets stripe r of all buffers, adds the stripes in the
    order of the tree, and hands the sum out. Cost: the ring's, 2(N-1) steps and 2(N-1)/N · K bytes from each rank, for
    K a multiple of N; K more memory while it runs.

    Errors: ValueError for fewer than 1 slice, and for more ranks than slices.
    """
    check_whole(slices=slices)
    if slices < 1:
        raise ValueError(f"slices must be at least 1, got {slices}; use as many as there may ever be workers")
    return Invariant(slices)


@dataclass(frozen=True)
class Invariant:
    """See `invariant`."""

    slices: int

    @property
    def __name__(self) -> str:
        return call_name(invariant, vars(self))

    def check(self, num_ranks: int) -> None:
        """Raise ValueError where there are more ranks than slices."""
        if num_ranks > self.slices:
            raise ValueError(
                f"route=invariant(slices={self.slices}) has work for at most {self.slices} workers, and there are "
                f"{num_ranks}; use route=invariant(slices={1 << (num_ranks - 1).bit_length()}), which has other bits"
            )

    async def __call__(self, port: Port, buffer: Tensor) -> Tensor:
        """The sum of all ranks' buffers."""
        self.check(port.size)
        num_ranks, rank = port.size, port.rank
        if num_ranks == 1 or (buffer.is_meta and await port.whole_sum(self, buffer)):
            return buffer
        stripes = list(buffer.tensor_split(num_ranks))
        mine, parts = stripes[rank], [stripes[rank]] * num_ranks
        turns = [((rank + k) % num_ranks, (rank - k) % num_ranks) for k in range(1, num_ranks)]
        for to, source in turns:
            parts[source] = await port.send_receive(stripes[to], to, like=mine, source=source)
        mine.copy_(along_tree(num_ranks, parts.__getitem__, Tensor.add))
        for to, source in turns:
            theirs = stripes[source]
            theirs.copy_(await port.send_receive(mine, to, like=theirs, source=source))
        return buffer


def invariant_rounds(num_ranks: int, numel: int) -> Iterator[Round]:
    """Messages of `invariant`, round by round."""
    ranks, sizes = np.arange(num_ranks), stripe_sizes(num_ranks, numel)
    for k in range(1, num_ranks):
        yield Round((ranks + k) % num_ranks, sizes[(ranks + k) % num_ranks])
    for k in range(1, num_ranks):
        yield Round((ranks + k) % num_ranks, sizes)
