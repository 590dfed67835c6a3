"""`FailureDetector`: when each node was last alive, and which nodes have been silent for too long."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from polytempo.server.timing import Timing


class FailureDetector:
    """A copy, a worker and a node that is only starting may be silent for different times (`Timing`).

    A node is alive when it sends a message, or when the engine sees its process run: a worker may compute for hours.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._heard_s: dict[int, float] = {}
        self._looked_s: float | None = None

    def note_alive(self, now_s: float, node: int) -> None:
        """`node` has sent a message, or its process was seen to run."""
        self._heard_s[node] = now_s

    def forget(self, node: int) -> None:
        """`node` is lost, and watched no more."""
        self._heard_s.pop(node, None)

    def silent_nodes(
        self, now_s: float, copies: Collection[int], workers: Iterable[int], starting: set[int]
    ) -> list[int]:
        """The nodes that have been silent for too long. Time in which this process stood still is subtracted."""
        timing = self._timing
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > 2 * timing.beat_s:
            self._heard_s = {node: heard_s + gap_s for node, heard_s in self._heard_s.items()}
        for node in {*copies, *starting}:
            self._heard_s.setdefault(node, now_s + (timing.starting_s if node in copies else 0.0))
        limits = dict.fromkeys(starting, timing.starting_s) | dict.fromkeys(copies, timing.lost_s)
        limits |= dict.fromkeys(workers, timing.worker_lost_s)
        return [node for node, limit_s in limits.items() if now_s - self._heard_s.get(node, now_s) > limit_s]
