"""The constants of rapid reassignment, and the helpers of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reassignment:
    """Parts are parts of one worker's share of one clock, between 0 and 1."""

    helpers: int = 4
    """How many workers may help one."""
    behind: float = 0.20
    """A worker that is farther behind a helper than this gives work away, for the rest of the clock to all ahead."""
    first_offer: float = 0.025
    later_offers: float = 0.05
    """The offer to a helper that has begun with all its slices."""
    grain: float = 0.0125
    """One slice: a worker's work between two looks at its mail."""
    report_every: float = 0.05
    """A worker reports to its helpees after this part of its share."""
    report_s: float = 0.05
    """The time between reports once its share is covered."""
    retry_s: float = 0.05
    """A helper that says nothing about its slices is asked again after this, then after twice as long, and so on."""
    patience: float = 2.0
    """How long to wait idly for slices that others have, in times that one slice takes the waiting worker itself."""
    silence_s: float = 2.0
    """No worker waits for a helpee that has been silent for this long."""
    slack: int = 0
    """Clocks that a worker may be ahead of its helpees: 0 with barriers, the bound with bounded staleness."""

    def __post_init__(self) -> None:
        """Raise ValueError for constants that contradict each other."""
        parts = (self.behind, self.first_offer, self.later_offers, self.grain, self.report_every)
        times = (self.report_s, self.retry_s, self.patience, self.silence_s)
        if not all(0 < part <= 1 for part in parts) or not all(time > 0 for time in times):
            raise ValueError(f"parts must be in (0, 1] and times positive, got {self}")
        if self.helpers < 0 or self.slack < 0:
            raise ValueError(f"helpers and slack cannot be negative, got {self}")
        if self.grain > self.first_offer or self.first_offer > self.later_offers:
            raise ValueError(f"needs grain <= first_offer <= later_offers, got {self}; a slice is the least to offer")

    @property
    def slices(self) -> int:
        """How many slices a share is cut into."""
        return round(1 / self.grain)

    def offer(self, first: bool) -> int:
        """How many slices to offer."""
        return max(1, round((self.first_offer if first else self.later_offers) / self.grain))


def helpers_of(worker: int, members: Sequence[int], helpers: int) -> tuple[int, ...]:
    """The next `helpers` members after `worker`, around the ring: each worker helps as many as help it."""
    return _around(worker, members, helpers, 1)


def helpees_of(worker: int, members: Sequence[int], helpers: int) -> tuple[int, ...]:
    """The workers that `worker` helps: the `helpers` members before it."""
    return _around(worker, members, helpers, -1)


def _around(worker: int, members: Sequence[int], count: int, direction: int) -> tuple[int, ...]:
    if worker not in members:
        raise ValueError(f"worker {worker} is none of the members {tuple(members)}")
    ring = sorted(members)
    place = ring.index(worker)
    return tuple(ring[(place + direction * i) % len(ring)] for i in range(1, min(count, len(ring) - 1) + 1))
