"""`Mesh`: ranks as coordinates on named axes. Pure arithmetic.

Mesh((("data", 2), ("model", 3)))        rank = Σ coordinate[axis] · stride[axis], the last axis varies fastest

          model 0   1   2                stride[axis] = product of the lengths of the axes behind it
data 0          0   1   2
data 1          3   4   5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

_MOST_AXES = 5
MOST_GROUPS = 2**_MOST_AXES
"""`Mesh.group_number` is below."""


@dataclass(frozen=True)
class Mesh:
    """Named axes and their lengths, in order. Raises ValueError for lengths below 1, and for too many axes."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        """Check lengths and the number of axes."""
        for axis, length in self.axes:
            if not isinstance(length, int) or length < 1:
                raise ValueError(f"axis {axis!r} of a mesh has length {length!r}; lengths are whole numbers from 1")
        if len(self._long) > _MOST_AXES:
            raise ValueError(
                f"a mesh has at most {_MOST_AXES} axes longer than 1, got {len(self._long)}: {self.lengths}; "
                "join two axes into one"
            )

    def __str__(self) -> str:
        return f"mesh({', '.join(f'{axis}={length}' for axis, length in self.axes)})"

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Lengths by axis."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.lengths.values())

    @property
    def _long(self) -> list[str]:
        return [axis for axis, length in self.axes if length > 1]

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinates by axis."""
        found: dict[str, int] = {}
        for axis, length in reversed(self.axes):
            rank, found[axis] = divmod(rank, length)
        return {axis: found[axis] for axis, _ in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates; 0 where an axis has none. Axes that the mesh lacks do not count."""
        rank = 0
        for axis, length in self.axes:
            coordinate = coordinates.get(axis, 0)
            if not 0 <= coordinate < length:
                raise ValueError(f"{self} has {axis} 0 to {length - 1}, not {coordinate}")
            rank = rank * length + coordinate
        return rank

    def group(self, rank: int, axes: Collection[str]) -> list[int]:
        """The ranks that differ from `rank` on no axes but these, in ascending order."""
        if len(set(axes)) != len(axes):
            raise ValueError(f"a group spans each axis once, not {list(axes)}")
        ranks = [0]
        own = self.coordinates(rank)
        for axis, length in self.axes:
            steps = range(length) if axis in axes else [own[axis]]
            ranks = [first * length + step for first in ranks for step in steps]
        return ranks

    def group_number(self, axes: Collection[str]) -> int:
        """A number of the groups along these axes: equal for groups with equal members; 0 for the whole mesh.

        Below `MOST_GROUPS`. (A group of one rank shares the whole's: it has nothing to send.)
        """
        spanned = [axis in axes for axis in self._long]
        return 0 if all(spanned) else sum(2**i for i, inside in enumerate(spanned) if inside)
