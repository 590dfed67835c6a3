"""`Ranges`: a set of mostly neighbouring whole numbers, kept as few ranges `[first, last]`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import final

Range = tuple[int, int]
"""The numbers from the first to the last, both included."""


@final
class Ranges:
    """A set of ints. Neighbouring ranges are merged, so numbers that come almost in order take almost no memory.

        >>> seen = Ranges([(0, 3)])
        >>> seen.add(5), seen.add(4)
        ([], [])
        >>> seen.tuples
        ((0, 5),)

    Memory is one pair a gap. A question costs a binary search; adding shifts the ranges behind the place.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int | None = None) -> list[Range]:
        """Put `first … last` (or `first` alone) into the set. Returns the numbers that were in it already."""
        last = first if last is None else last
        if first > last:
            raise ValueError(f"a range goes from its first number up to its last, got {first} to {last}")
        begin = bisect_left(self._lasts, first - 1)  # the first range that touches the new one, and the last
        end = bisect_right(self._firsts, last + 1)
        if begin == end:
            self._firsts.insert(begin, first)
            self._lasts.insert(begin, last)
            return []
        already = self.common(first, last)
        merged_first, merged_last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end], self._lasts[begin:end] = [merged_first], [merged_last]
        return already

    def common(self, first: int, last: int) -> list[Range]:
        """The numbers of `first … last` that are in the set."""
        begin, end = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        return [(max(first, self._firsts[i]), min(last, self._lasts[i])) for i in range(begin, end)]

    def missing(self, first: int, last: int) -> list[Range]:
        """The numbers of `first … last` that are not in the set."""
        gaps, position = [], first
        for begin, end in self.common(first, last):
            if position < begin:
                gaps.append((position, begin - 1))
            position = end + 1
        return [*gaps, (position, last)] if position <= last else gaps

    def covers(self, first: int, last: int) -> bool:
        """True if all of `first … last` are in the set."""
        place = bisect_left(self._lasts, last)
        return first > last or (place < len(self._firsts) and self._firsts[place] <= first)

    @property
    def tuples(self) -> tuple[Range, ...]:
        """The set as the fewest ranges, ascending."""
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def __contains__(self, number: int) -> bool:
        return self.covers(number, number)

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __iter__(self) -> Iterator[Range]:
        return iter(self.tuples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.tuples == other.tuples

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Ranges({list(self.tuples)})"
