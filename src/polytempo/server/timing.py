"""Waiting times and deadlines between the machines of a parameter server."""

from __future__ import annotations

from dataclasses import dataclass, replace

_STOPPED_PART = 4
"""A stopped worker is given up after deadline_s divided by this."""


@dataclass(frozen=True)
class Timing:
    """Seconds. A node that sends no message for `lost_s` is lost; it sends a beat every `beat_s`."""

    retry_s: float = 0.25
    """An unanswered message is sent again after this, then after twice as long, up to `longest_retry_s`."""
    longest_retry_s: float = 2.0
    beat_s: float = 0.25
    lost_s: float = 2.0
    worker_lost_s: float = 30.0
    """The same for a worker, which sends nothing while it computes. Where no engine looks at the processes (see
    `FailureDetector`), this must be longer than any step takes."""
    deadline_s: float = 120.0
    """A request that has not been answered for so long raises `TimedOut` in its worker."""
    starting_s: float = 60.0
    """The time limit for a node's first message."""

    def __post_init__(self) -> None:
        """Raise ValueError for times that contradict each other."""
        if not 0 < self.retry_s <= self.longest_retry_s or not 0 < self.beat_s < self.lost_s:
            raise ValueError(f"needs 0 < retry_s <= longest_retry_s and 0 < beat_s < lost_s, got {self}")

    def of_processes(self, busy_s: float) -> Timing:
        """The same for an engine that sees which processes run (see `FailureDetector`): only a stopped one is silent.

        It is replaced before the workers that wait for it time out. `busy_s`: how long a copy may take for an update.
        """
        stopped_s = self.deadline_s / _STOPPED_PART
        return replace(
            self,
            lost_s=self.lost_s + busy_s,
            worker_lost_s=min(self.worker_lost_s, stopped_s),
            starting_s=min(self.starting_s, stopped_s),
        )
