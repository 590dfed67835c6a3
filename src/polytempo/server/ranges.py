"""`Ranges`: a growing set of whole numbers that come nearly in order, as merged ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Ranges:
    """Numbers as ranges [first, last]: 0…6, 8, 10…12 takes three of them, however many numbers there are.

    Cost: a look-up in the logarithm of the number of ranges, which is at most one more than that of gaps.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self._firsts.append(first)
            self._lasts.append(last)

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._firsts, number) - 1
        return i >= 0 and number <= self._lasts[i]

    def add(self, number: int) -> None:
        """Put `number` in; nothing happens if it is there already."""
        firsts, lasts = self._firsts, self._lasts
        i = bisect_right(firsts, number)
        if i and number <= lasts[i - 1]:
            return
        extends = i > 0 and lasts[i - 1] == number - 1
        precedes = i < len(firsts) and firsts[i] == number + 1
        if extends and precedes:
            lasts[i - 1] = lasts[i]
            del firsts[i], lasts[i]
        elif extends:
            lasts[i - 1] = number
        elif precedes:
            firsts[i] = number
        else:
            firsts.insert(i, number)
            lasts.insert(i, number)

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The ranges (first, last), ascending."""
        return tuple(zip(self._firsts, self._lasts, strict=True))
