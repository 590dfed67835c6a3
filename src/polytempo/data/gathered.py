"""`Gathered`: rows of tensors in the order of an epoch, taken out many at once for all ranks of a process.

order of the epoch   │ 17 3 88 41 … │ 5 60 12 … │        blocks of rows, each gathered when a rank first needs it
a rank's batch            ╰───╯                         a window into one
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from torch import Tensor

_BLOCK_ROWS = 4096
_MOST_BLOCKS = 4


class _Key(NamedTuple):
    epoch: int
    number: int
    data: int
    """The identity of the data's first tensor, which a block keeps alive."""


class _Block(NamedTuple):
    source: Tensor
    rows: list[Tensor]


class Gathered:
    """For ranks that see the same data in the same order. Batches are windows: no two ranks have a sample in common.

    Memory: the last four blocks of 4,096 rows.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()

    def batch(self, tensors: tuple[Tensor, ...], order: Tensor, epoch: int, start: int, stop: int) -> list[Tensor]:
        """Rows `order[start:stop]` of each of the `tensors`, where `order` (num_samples,) is that of `epoch`."""
        number, begin = divmod(start, _BLOCK_ROWS)
        if begin + stop - start > _BLOCK_ROWS:
            rows = order[start:stop]
            return [tensor.index_select(0, rows) for tensor in tensors]
        key = _Key(epoch, number, id(tensors[0]))
        block = self._blocks.get(key)
        if block is None:
            rows = order[number * _BLOCK_ROWS : (number + 1) * _BLOCK_ROWS]
            block = self._blocks[key] = _Block(tensors[0], [tensor.index_select(0, rows) for tensor in tensors])
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        return [gathered[begin : begin + stop - start] for gathered in block.rows]
