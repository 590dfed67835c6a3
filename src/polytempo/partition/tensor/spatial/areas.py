"""`PictureGrid`: the cut of a picture into a grid of areas, one on each rank.

    sizes (5, 7), grid (2, 2)        columns 0-3   columns 4-6
                       rows 0-2      rank 0        rank 1
                       rows 3-4      rank 2        rank 3

The cut depends on the sizes alone, so two pictures of the same sizes are cut alike, whichever layers made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import isqrt, prod
from types import MappingProxyType

import torch
from torch import Tensor

from polytempo.partition.tensor.division import even_sizes

Span = tuple[int, int]
"""Begin and end."""
Area = tuple[Span, ...]
"""A span of each dimension of places."""
Areas = tuple[Area, ...]
"""An area of each rank."""


@dataclass(frozen=True)
class PictureGrid:
    """Sizes of a whole picture, (…, rows, columns), and the ranks along each dimension, the last one fastest."""

    sizes: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def divide(self) -> bool:
        """True if every rank has a place."""
        return all(size >= ranks for size, ranks in zip(self.sizes, self.grid, strict=True))

    @property
    def areas(self) -> Areas:
        """Each rank's area."""
        return _areas(self.sizes, self.grid)

    def numbers(self, rank: int) -> int:
        """PictureGrid of a rank."""
        return volume(self.areas[rank])

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's area of (…, *sizes), in memory of its own."""
        return cut_out(whole, self.areas[rank], [0] * len(self.sizes)).contiguous()

    def flat(self, whole: Tensor) -> Tensor:
        """(…, *sizes) as the ranks' areas in a row, each flat."""
        return torch.cat([cut_out(whole, area, [0] * len(self.sizes)).reshape(-1) for area in self.areas])

    def joined(self, flat: Tensor, before: Sequence[int]) -> Tensor:
        """The inverse of `flat`; `before` are the sizes of the other dimensions."""
        sizes = [prod(before) * volume(area) for area in self.areas]
        shapes = [[*before, *(end - begin for begin, end in area)] for area in self.areas]
        parts: list[Tensor] = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        for dim in range(1, len(self.grid) + 1):
            ranks = self.grid[-dim]
            parts = [torch.cat(parts[i : i + ranks], -dim) for i in range(0, len(parts), ranks)]
        return parts[0]


@lru_cache(maxsize=4096)
def _areas(sizes: tuple[int, ...], grid: tuple[int, ...]) -> Areas:
    spans: list[list[Span]] = []
    for size, ranks in zip(sizes, grid, strict=True):
        each = even_sizes(size, ranks, what="places")
        begins = [sum(each[:rank]) for rank in range(ranks)]
        spans.append([(begin, begin + long) for begin, long in zip(begins, each, strict=True)])
    return tuple(product(*spans))


def volume(area: Area) -> int:
    """Number of places."""
    return prod(end - begin for begin, end in area)


def common(first: Area, second: Area) -> Area | None:
    """The places of both areas; None without any."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return found if all(begin < end for begin, end in found) else None


def cut_out(tensor: Tensor, area: Area, begins: Sequence[int]) -> Tensor:
    """The view of an area of a tensor that begins at the place `begins`."""
    for dim, (begin, end) in enumerate(area, start=-len(area)):
        tensor = tensor.narrow(dim, begin - begins[dim], end - begin)
    return tensor


def begins(area: Area) -> list[int]:
    """The first place in each dimension."""
    return [begin for begin, _ in area]


Pieces = Mapping[tuple[int, int], Area]
"""(sender, receiver) -> the area that travels, or that a rank keeps."""


@lru_cache(maxsize=4096)
def pieces(have: Areas, want: Areas) -> Pieces:
    """The areas that ranks need of each other, if rank r has `have[r]` and wants `want[r]`.

    piece(s, r) = have[s] ∩ want[r]
    """
    found: dict[tuple[int, int], Area] = {}
    for receiver, wanted in enumerate(want):
        for sender, held in enumerate(have):
            area = common(held, wanted)
            if area is not None:
                found[sender, receiver] = area
    return MappingProxyType(found)


@cache
def grid_of(ranks: int, rows: int | None = None, columns: int | None = None) -> tuple[int, int]:
    """(rows, columns) of so many ranks: as near to a square as can be, more rows than columns.

        grid_of(4) == (2, 2)        grid_of(6) == (3, 2)        grid_of(6, rows=1) == (1, 6)

    Raises ValueError where the product is another number.
    """
    if rows is None and columns is None:
        columns = next(each for each in range(isqrt(ranks), 0, -1) if ranks % each == 0)
    rows = ranks // columns if rows is None and columns is not None else rows
    assert rows is not None
    columns = ranks // rows if columns is None and rows else columns
    if columns is None or rows * columns != ranks:
        raise ValueError(
            f"{ranks} ranks cannot be a grid of {rows} rows and {columns} columns; let rows times columns be {ranks}"
        )
    return rows, columns
