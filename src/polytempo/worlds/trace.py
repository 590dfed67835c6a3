"""The trace: one line for every operation of every rank, the same in both worlds."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from polytempo.core import files

_PACKED = struct.Struct("<iiiqqdd")


class Event(NamedTuple):
    """One operation. Times in seconds since the run began; `bytes` is what this rank sent for it."""

    rank: int
    step: int
    op: str
    bytes: int
    start_s: float
    end_s: float
    peer: int = -1


WAITING = frozenset({"recv", "take"})
"""Communication that a rank only waits for."""

COMMUNICATION = WAITING | {"send", "post", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"}


class Trace:
    """Events, their totals and their hash.

    Totals and hash cover every event. The events themselves are kept up to `max_events`, so that a
    long run cannot fill the memory. With `timed=False` the hash leaves times out: what a run on
    real processes repeats is the sequence of operations, not their duration.
    """

    def __init__(self, *, timed: bool, max_events: int = 200_000) -> None:
        self.events: list[Event] = []
        self.dropped = 0
        self.bytes_sent: dict[int, int] = defaultdict(int)
        self.messages: dict[tuple[int, str], int] = defaultdict(int)
        self.seconds: dict[tuple[int, str], float] = defaultdict(float)
        self._timed = timed
        self._max_events = max_events
        self._digest = hashlib.sha256()
        self._op_numbers: dict[str, int] = {}

    def add(self, event: Event) -> None:
        """Append one event."""
        rank, step, op, num_bytes, start_s, end_s, peer = event
        self.bytes_sent[rank] += num_bytes
        self.messages[rank, op] += 1
        self.seconds[rank, op] += end_s - start_s
        number = self._op_numbers.get(op)
        if number is None:
            number = self._op_numbers[op] = int.from_bytes(hashlib.sha256(op.encode()).digest()[:3], "little")
        times = (start_s, end_s) if self._timed else (0.0, 0.0)
        self._digest.update(_PACKED.pack(rank, step, number, num_bytes, peer, *times))
        if len(self.events) < self._max_events:
            self.events.append(event)
        else:
            self.dropped += 1

    @property
    def hash(self) -> str:
        """SHA-256 over all events in their order."""
        return self._digest.hexdigest()


def combined_hash(hashes: Iterable[str]) -> str:
    """One hash for the traces of several ranks, in the order of ranks."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def chrome_trace(events: Iterable[Event], *, title: str) -> dict[str, object]:
    """The events in Chrome's trace format, which Perfetto and chrome://tracing open: one track a rank and kind.

    Operations of one kind that overlap on a rank stand on tracks of their own: viewers drop what
    overlaps within a track.
    """
    events = list(events)
    tracks = _tracks(events)
    names: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    for rank, track in sorted({(event.rank, track) for event, track in zip(events, tracks, strict=True)}):
        lane, kind = divmod(track, len(_KINDS))
        name = _KINDS[kind] if not lane else f"{_KINDS[kind]} {lane + 1}"
        names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}})
    slices: list[dict[str, object]] = [
        {
            "name": event.op,
            "cat": "communication" if event.op in COMMUNICATION else "compute",
            "ph": "X",
            "pid": event.rank,
            "tid": track,
            "ts": event.start_s * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
            "args": {"step": event.step, "bytes": event.bytes, "peer": event.peer},
        }
        for event, track in zip(events, tracks, strict=True)
    ]
    return {"traceEvents": names + slices, "displayTimeUnit": "ms", "otherData": {"title": title}}


_KINDS = ("compute", "communication", "recv")


def _tracks(events: list[Event]) -> list[int]:
    """A track for each event: its kind's, or the first further one that is free from its start to its end."""
    ends_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    tracks = [0] * len(events)
    for i in sorted(range(len(events)), key=lambda i: events[i].start_s):
        event = events[i]
        kind = 0 if event.op not in COMMUNICATION else 2 if event.op in WAITING else 1
        ends = ends_s[event.rank, kind]
        lane = next((lane for lane, end_s in enumerate(ends) if end_s <= event.start_s), len(ends))
        ends[lane : lane + 1] = [event.end_s]
        tracks[i] = kind + len(_KINDS) * lane
    return tracks


def write_chrome_trace(path: Path, events: Iterable[Event], *, title: str) -> None:
    """Write `chrome_trace` as JSON, complete or not at all."""
    files.replace(path, json.dumps(chrome_trace(events, title=title)))
