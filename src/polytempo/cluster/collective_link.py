"""`CollectiveLink`: the measured rates of a collective, of the host's own group or of devices'."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import inf


@dataclass(frozen=True)
class CollectiveLink:
    """Latencies of each round, by the bytes of a rank's message, and the bytes a second of large ones.

    Libraries cut messages of some sizes into segments, each with a latency of its own: gloo's sum of 4 KiB may take
    five times as long as its sum of 8 bytes, and no longer than its sum of 256 KiB.
    """

    bytes_per_s: float
    sizes: tuple[float, ...]
    """Ascending, in bytes."""
    latencies_s: tuple[float, ...]
    """Latencies at those sizes; in between on a straight line, beyond them the latency of the nearest."""

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not ascend, another number of latencies, or no rate."""
        ascending = all(a < b for a, b in pairwise(self.sizes))
        if not self.sizes or not ascending or self.sizes[0] < 0 or len(self.sizes) != len(self.latencies_s):
            raise ValueError(f"a collective's link needs a latency for each of its ascending sizes, got {self}")
        if not all(0 <= each < inf for each in self.latencies_s) or not self.bytes_per_s > 0:
            raise ValueError(f"a collective's link needs latencies_s >= 0 and bytes_per_s > 0, got {self}")

    def latency_s(self, num_bytes: float) -> float:
        """Latency of a round with so many bytes in each rank's message."""
        place = bisect_left(self.sizes, num_bytes)
        if place == 0 or place == len(self.sizes):
            return self.latencies_s[max(0, place - 1)]
        (low, high), (before_s, after_s) = self.sizes[place - 1 : place + 1], self.latencies_s[place - 1 : place + 1]
        return before_s + (num_bytes - low) / (high - low) * (after_s - before_s)
