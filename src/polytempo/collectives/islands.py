"""Islands: consecutive ranks, as many to each island as to the others, or one more.

5 ranks on 2 islands      0 1 2 | 3 4       the first rank of an island leads it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from polytempo.core import Port, Route
from polytempo.core.cost import route_name

Islands = int | tuple[tuple[int, ...], ...]
"""The number of islands of consecutive ranks, or the ranks of each, its leader first."""


def islands_of(size: int, number: Islands) -> Sequence[Sequence[int]]:
    """The ranks of each of `number` islands; with fewer ranks than that, an island each.

    >>> islands_of(5, 2)
    [range(0, 3), range(3, 5)]
    """
    if isinstance(number, tuple):
        return number
    number = min(number, size)
    each, longer = divmod(size, number)
    begins = [i * each + min(i, longer) for i in range(number + 1)]
    return [range(a, b) for a, b in pairwise(begins)]


def inside(port: Port, number: Islands) -> Port:
    """The group of this rank's island."""
    return port.among(next(ranks for ranks in islands_of(port.size, number) if port.rank in ranks))


def leaders(port: Port, number: Islands) -> Port:
    """The group of the islands' first ranks, which this rank must be one of."""
    return port.among([ranks[0] for ranks in islands_of(port.size, number)])


@dataclass(frozen=True)
class OnIslands:
    """A route of sums within each island, all at the same time, or of a sum over the `leading` ranks alone."""

    route: Route
    number: Islands
    leading: bool = False

    @property
    def __name__(self) -> str:
        return route_name(self.route)

    def groups(self, hosts: Sequence[int]) -> list[list[int]]:
        """The hosts of each group's ranks, from the hosts of all ranks."""
        islands = islands_of(len(hosts), self.number)
        return [[hosts[r[0]] for r in islands]] if self.leading else [[hosts[rank] for rank in r] for r in islands]

    async def __call__(self, port: Port, buffer: Tensor) -> Tensor:
        """The sum of the group's buffers."""
        return await self.route((leaders if self.leading else inside)(port, self.number), buffer)
