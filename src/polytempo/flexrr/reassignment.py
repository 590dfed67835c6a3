"""The constants of rapid reassignment, and the helpers of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reassignment:
    """Parts are parts of one worker's share of one clock, between 0 and 1."""

    helpers: int = 4
    """Workers that may help one."""
    behind: float = 0.20
    """A worker that is farther behind a helper gives work away, for the rest of the clock to all ahead."""
    first_offer: float = 0.025
    later_offers: float = 0.05
    """The offer to a helper that has begun with all its slices."""
    grain: float = 0.0125
    """A slice: a worker's work between two looks at its mail."""
    report_every: float = 0.05
    """A worker reports to its helpees after this part of its share."""
    report_s: float = 0.05
    """The time between reports once its share is covered."""
    retry_s: float = 0.05
    """A helper that says nothing about its slices is asked again after this, then after twice as long, and so on."""
    patience: float = 2.0
    """Idle wait for others' slices before one is contested, in times that one slice takes the waiting worker."""
    silence_s: float = 2.0
    """No worker waits for a helpee that has been silent for this long."""
    slack: int = 0
    """Clocks that a worker may be ahead of its helpees: 0 with barriers, the bound with bounded staleness."""

    def __post_init__(self) -> None:
        """Raise ValueError for constants out of range, or that contradict each other."""
        for name in ("behind", "first_offer", "later_offers", "grain", "report_every"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is a part of a worker's batch, above 0 and at most 1, got {getattr(self, name)}"
                )
        for name in ("report_s", "retry_s", "patience", "silence_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("helpers", "slack"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.grain > self.first_offer or self.first_offer > self.later_offers:
            raise ValueError(
                "a slice (grain) is the least that a worker can offer, so grain <= first_offer <= later_offers; got "
                f"grain={self.grain}, first_offer={self.first_offer}, later_offers={self.later_offers}"
            )

    @property
    def slices(self) -> int:
        """Slices of a share."""
        return round(1 / self.grain)

    def offer(self, first: bool) -> int:
        """Slices to offer, first or later."""
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
