"""Each rank's indices of a tensor: contiguous, as even as possible, in units such as heads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


def even_sizes(total: int, num_ranks: int, unit: int = 1, what: str = "features") -> tuple[int, ...]:
    """Sizes that add up to `total`, each a multiple of `unit`, at most one unit apart, the larger ones first.

        even_sizes(10, 4) == (3, 3, 2, 2)        even_sizes(12, 2, unit=4) == (8, 4)

    Raises ValueError where a rank would have none, or `unit` does not divide `total`.
    """
    if total % unit:
        raise ValueError(
            f"{total} {what} cannot be divided by {unit}, and heads are not cut; give a number that divides"
        )
    units = total // unit
    if units < num_ranks:
        each = f"{units} heads of {unit} {what}" if unit > 1 else f"{total} {what}"
        raise ValueError(f"{each} cannot be split over {num_ranks} ranks: some would have none; use at most {units}")
    smallest, longer = divmod(units, num_ranks)
    return tuple(unit * (smallest + (rank < longer)) for rank in range(num_ranks))


@dataclass(frozen=True)
class Division:
    """A tensor's cut along `dim`: `sizes[r]` indices of each of `packed` equal blocks are rank r's.

    packed=3, sizes=(2, 1):   q q q k k k v v v   ──▶   rank 0: q q k k v v     rank 1: q k v

    Of a grid of ranks (`grid_division`), `dim` and the next dimension are cut, into the sizes in `along`; `sizes` then
    counts the places of both that each rank has, the ranks of a row one after the other.
    """

    dim: int
    sizes: tuple[int, ...]
    packed: int = 1
    along: tuple[tuple[int, ...], ...] = ()

    @property
    def total(self) -> int:
        """Indices of the whole tensor along `dim`."""
        return self.packed * sum(self.sizes)

    def begin(self, rank: int) -> int:
        """A rank's first index in each block."""
        return sum(self.sizes[:rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole tensor, in memory of its own."""
        if self.along:
            rows, columns = self._rows_and_columns()
            row, column = divmod(rank, len(columns.sizes))
            return columns.take(rows.take(whole, row), column)
        blocks = [b.narrow(self.dim, self.begin(rank), self.sizes[rank]) for b in whole.chunk(self.packed, self.dim)]
        return torch.cat(blocks, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from all ranks' parts, in their order."""
        if self.along:
            rows, columns = self._rows_and_columns()
            each = len(columns.sizes)
            return rows.join([columns.join(parts[i : i + each]) for i in range(0, len(parts), each)])
        blocks = [part.chunk(self.packed, self.dim) for part in parts]
        return torch.cat([block[i] for i in range(self.packed) for block in blocks], self.dim)

    def shape(self, part: Sequence[int], rank: int) -> list[int]:
        """The shape of a rank's part, from the shape of another one's."""
        found = list(part)
        if self.along:
            rows, columns = self.along
            row, column = divmod(rank, len(columns))
            found[self.dim : self.dim + 2] = rows[row], columns[column]
        else:
            found[self.dim] = self.packed * self.sizes[rank]
        return found

    def _rows_and_columns(self) -> tuple[Division, Division]:
        rows, columns = self.along
        return Division(self.dim, rows), Division(self.dim + 1, columns)

    def spans(self) -> list[tuple[int, int]]:
        """Each rank's (begin, end) in a block."""
        ends = list(accumulate(self.sizes))
        return [(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


def grid_division(rows: tuple[int, ...], columns: tuple[int, ...]) -> Division:
    """The cut of (rows, columns, …) over a grid of ranks, into parts of these sizes.

    grid_division((3, 2), (4, 3)) of 5 x 7:     rank 0: 3 x 4     rank 1: 3 x 3     rank 2: 2 x 4     rank 3: 2 x 3
    """
    return Division(0, tuple(row * column for row in rows for column in columns), along=(rows, columns))


Cuts = Mapping[str, Division]
"""Cut tensors by the whole model's names."""
PARTS = "parts"
"""Name of the scalar with the cuts of a rank's tensors."""


def described(number: int, cut: Cuts) -> str:
    """The text of the model's cuts and of the number of this part."""
    cuts = {name: [how.dim, list(how.sizes), how.packed, *map(list, how.along)] for name, how in cut.items()}
    return json.dumps({"number": number, "cut": cuts})


def cuts_of(described: str) -> tuple[int, dict[str, Division]]:
    """The number of the part and the cuts that `described` has told. KeyError, TypeError or ValueError for another."""
    told = json.loads(described)
    cut = {
        str(name): Division(int(dim), _numbers(sizes), int(packed), tuple(_numbers(each) for each in along))
        for name, (dim, sizes, packed, *along) in told["cut"].items()
    }
    return int(told["number"]), cut


def _numbers(told: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(each) for each in told)
