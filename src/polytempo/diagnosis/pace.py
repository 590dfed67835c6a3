"""`PaceSnapshot`: one rank's seconds so far, and the pace of all ranks between two of them.

rank 3   ── busy ──────────────── wait ── busy ────────────── wait ──▶ busy seconds a step: large, and it waits least
rank 0   ── busy ────── wait ────────────  busy ───── wait ──────────▶
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class PaceSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """Totals of one rank since its world began."""

    step: int
    now_s: float
    busy_s: float
    """Seconds without waits for other ranks."""
    waited_s: float
    read_s: float
    """The part of the busy seconds that got batches."""
    who: str = ""
    """The rank's name in diagnoses: "rank 3", "stage 1 (rank 3)"."""
    host: str = ""
    requests: int = 0
    """The last request for a cause that it has seen."""
    cause: str | None = None
    """The finding on its host for that request: "" is nothing; None: it has none yet."""


class RankTimes(NamedTuple):
    """One rank's totals of a run."""

    seconds: float
    busy_s: float
    waited_s: float
    read_s: float


class PaceWindow(NamedTuple):
    """The ranks between two of their snapshots."""

    first_step: int
    step: int
    busy_s: Mapping[int, float]
    """Busy seconds in a step, by rank."""
    read_share: Mapping[int, float]
    """Part of these seconds that got batches, 0 to 1."""


def window_between(
    before: Mapping[int, PaceSnapshot], after: Mapping[int, PaceSnapshot], size: int
) -> PaceWindow | None:
    """The window from each rank's snapshot `before` to the one `after`. None until all `size` ranks have advanced."""
    if len(before) < size or any(after[rank].step <= was.step for rank, was in before.items()):
        return None
    busy_s, read_share = {}, {}
    for rank, was in before.items():
        now = after[rank]
        busy_s[rank] = max(0.0, now.busy_s - was.busy_s) / (now.step - was.step)
        read_share[rank] = (now.read_s - was.read_s) / max(now.busy_s - was.busy_s, 1e-12)
    steps = [after[rank].step for rank in before]
    return PaceWindow(min(was.step for was in before.values()), max(steps), busy_s, read_share)
