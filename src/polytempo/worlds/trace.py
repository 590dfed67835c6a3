"""The trace: one line for every operation of every rank, the same in both worlds."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

from polytempo.core.system import files
from polytempo.core.system.url_path import Place

MOST_WRITTEN = 50_000
"""Events in a file, of all ranks together."""
_PACKED = struct.Struct("<iiiqqdd")
_RANK = struct.Struct("<i")
"""The beginning of a packed line."""
_COUNTED_AT_ONCE = 512
_Total = TypeVar("_Total", int, float)


class Event(NamedTuple):
    """One operation. Times in seconds since the run began; `bytes` are the bytes that this rank sent for it."""

    rank: int
    step: int
    op: str
    bytes: int
    start_s: float
    end_s: float
    peer: int = -1


Line = tuple[int, int, str, int, float, float, int]
"""The fields of an `Event`: a plain tuple is made in half the time, and most events are never looked at."""

WAITING = frozenset({"recv", "take"})
"""Communication that a rank only waits for."""

COMMUNICATION = WAITING | {"send", "post", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"}

OFF_THE_CLOCK = frozenset({"score", "save"})
"""Operations during which training stands still, so that seconds of a run leave them out. They have lines, too."""


class OpTotals(NamedTuple):
    """Operations of one kind and one rank."""

    number: int
    sent_bytes: int
    """Bytes that the rank has sent in them."""
    seconds: float
    """The sum of their durations; they may overlap."""


class Tail(Protocol):
    """Shows the last events while the run goes on; `worlds.trace_tail` has one."""

    most: int
    """The number of events that it shows."""

    @property
    def rest_s(self) -> float:
        """Seconds until it shows events again; 0 or less: now."""

    def show(self, events: list[Event]) -> None:
        """Show these events instead of earlier ones."""


class Trace:
    """Events, their totals and their hash.

    Totals and hash cover every event. Only the last `max_events` events are kept, so that a long run cannot fill the
    memory; `dropped` counts the others. With `timed=False` the hash leaves times out: a run on real processes repeats
    the sequence of operations, not their duration.

    `groups`: all ranks, by the first one of each group: an event of that one is added for all of its group, in order.
    """

    def __init__(self, *, timed: bool, max_events: int = 200_000, groups: Mapping[int, range] | None = None) -> None:
        self._events: deque[Line] = deque(maxlen=max_events)
        self._max_events = max_events
        self._groups = groups or {}
        self._heads = {first: [_RANK.pack(rank) for rank in group] for first, group in self._groups.items()}
        self._fresh: list[Line] = []
        """Events that are not counted yet: counting many together is faster."""
        self._counted = 0
        self._bytes_sent: dict[int, int] = defaultdict(int)
        self._op_bytes: dict[tuple[int, str], int] = defaultdict(int)
        self._messages: dict[tuple[int, str], int] = defaultdict(int)
        self._seconds: dict[tuple[int, str], float] = defaultdict(float)
        self._timed = timed
        self._digest = hashlib.sha256()
        self._op_numbers = _OpNumbers()
        self._tail: Tail | None = None
        self._tail_at_s = math.inf
        """The end of the event that brings a look at the tail; a virtual clock does not tell when."""

    def add(self, event: Line) -> None:
        """Append one event."""
        self._fresh.append(event)
        if len(self._fresh) >= _COUNTED_AT_ONCE or event[5] >= self._tail_at_s:
            self._count()

    def show_in(self, tail: Tail | None) -> None:
        """Show the last events in `tail` from now on, until `excerpt`. It changes no hash and no total."""
        self._tail, self._tail_at_s = tail, math.inf if tail is None or self._timed else -math.inf

    def add_messages(self, event: Event, sent: int, received: int) -> None:
        """Append one event that stands for so many messages of its rank, sent and received."""
        self.add(event)
        self._count()
        self._messages[event.rank, "send"] += sent - 1
        self._messages[event.rank, "recv"] += received

    @property
    def events(self) -> list[Event]:
        """The last events, in their order."""
        self._count()
        return self._last(self._max_events)

    def _last(self, most: int) -> list[Event]:
        last = reversed(self._events)
        if not self._groups:
            return [Event(*line) for line in islice(last, most)][::-1]
        kept: list[Event] = []
        for line in last:
            kept += [Event(rank, *line[1:]) for rank in reversed(self._groups[line[0]])]
            if len(kept) >= most:
                break
        return kept[:most][::-1]

    @property
    def dropped(self) -> int:
        """The number of events at the beginning that are not kept."""
        self._count()
        return max(0, self._counted - self._max_events)

    @property
    def bytes_sent(self) -> dict[int, int]:
        """Bytes by rank."""
        self._count()
        return self._of_all(self._bytes_sent)

    def exchanged(self, rank: int) -> dict[str, OpTotals]:
        """The messages and collectives of a rank so far, by operation."""
        self._count()
        first = next((first for first, group in self._groups.items() if rank in group), rank)
        keys = {op: (first, op) for op in sorted(COMMUNICATION) if (first, op) in self._messages}
        return {op: OpTotals(self._messages[k], self._op_bytes.get(k, 0), self._seconds[k]) for op, k in keys.items()}

    @property
    def messages(self) -> dict[tuple[int, str], int]:
        """The number of events, by rank and operation."""
        self._count()
        return self._of_all_ops(self._messages)

    @property
    def seconds(self) -> dict[tuple[int, str], float]:
        """The sum of the events' durations, by rank and operation."""
        self._count()
        return self._of_all_ops(self._seconds)

    def excerpt(self, most: int) -> dict[str, Any]:
        """The last events, at most so many, and the number before them, ready for JSON (see `joined`)."""
        self.show_in(None)  # `write_chrome_trace` takes the tails away
        kept = self.events[-most:]
        return {
            "events": [list(event) for event in kept],
            "dropped": self._counted - len(kept),
            "hash": self.hash,
        }

    def _count(self) -> None:
        fresh, self._fresh = self._fresh, []
        bytes_sent, messages, seconds, numbers = self._bytes_sent, self._messages, self._seconds, self._op_numbers
        packed, pack, op_bytes = [], _PACKED.pack, self._op_bytes
        for rank, step, op, num_bytes, start_s, end_s, peer in fresh:
            bytes_sent[rank] += num_bytes
            key = (rank, op)
            if num_bytes:
                op_bytes[key] += num_bytes
            messages[key] += 1
            seconds[key] += end_s - start_s
            if not self._timed:
                start_s = end_s = 0.0
            packed.append(pack(rank, step, numbers[op], num_bytes, peer, start_s, end_s))
        if self._groups:
            packed = [self._of_group(line[0], each) for line, each in zip(fresh, packed, strict=True)]
        lines = b"".join(packed)
        self._digest.update(lines)
        self._counted += len(lines) // _PACKED.size
        self._events.extend(fresh)
        if self._tail is not None and fresh:
            self._show(self._tail, fresh[-1][5])

    def _show(self, tail: Tail, now_s: float) -> None:
        if tail.rest_s <= 0:
            tail.show(self._last(tail.most))
        if not self._timed:
            self._tail_at_s = now_s + tail.rest_s

    def _of_group(self, first: int, line: bytes) -> bytes:
        """The packed line of the first rank of a group, for each rank of it."""
        rest = line[_RANK.size :]
        return rest.join(self._heads[first]) + rest

    def _of_all(self, totals: dict[int, int]) -> dict[int, int]:
        if not self._groups:
            return totals
        return defaultdict(int, {rank: n for first, n in totals.items() for rank in self._groups[first]})

    def _of_all_ops(self, totals: dict[tuple[int, str], _Total]) -> dict[tuple[int, str], _Total]:
        if not self._groups:
            return totals
        return {(rank, op): total for (first, op), total in totals.items() for rank in self._groups[first]}

    @property
    def hash(self) -> str:
        """SHA-256 over all events in their order."""
        self._count()
        return self._digest.hexdigest()


class _OpNumbers(dict[str, int]):
    """Numbers that stand for operations' names in the hash."""

    def __missing__(self, op: str) -> int:
        number = self[op] = int.from_bytes(hashlib.sha256(op.encode()).digest()[:3], "little")
        return number


class Joined(NamedTuple):
    """Events of several traces, and the number of dropped events before them."""

    events: list[Event]
    dropped: int


def joined(excerpts: Iterable[Mapping[str, Any]]) -> Joined:
    """The `Trace.excerpt`s of several processes together."""
    excerpts = list(excerpts)
    events = [Event(*event) for excerpt in excerpts for event in excerpt["events"]]
    return Joined(events, sum(excerpt["dropped"] for excerpt in excerpts))


def combined_hash(hashes: Iterable[str]) -> str:
    """One hash for the traces of several ranks, in the order of ranks."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def chrome_trace(events: Iterable[Event], *, title: str, dropped: int = 0) -> dict[str, object]:
    """The events in Chrome's trace format, which Perfetto and chrome://tracing open: one track a rank and kind.

    Operations of one kind that overlap on a rank stand on tracks of their own: viewers drop overlaps within a track. At
    most the last `MOST_WRITTEN` events are there; where events are left out, `dropped` of them by the caller, a mark at
    the beginning gives their number.
    """
    events = list(events)
    if len(events) > MOST_WRITTEN:
        dropped += len(events) - MOST_WRITTEN
        events = sorted(events, key=lambda event: event.end_s)[-MOST_WRITTEN:]
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
    if dropped:
        mark = f"{dropped:,} earlier operations are left out"
        begin_us = min((event.start_s for event in events), default=0.0) * 1e6
        names.append({"name": mark, "ph": "i", "s": "g", "pid": 0, "ts": begin_us})
    other = {"title": title, "dropped": dropped}
    return {"traceEvents": names + slices, "displayTimeUnit": "ms", "otherData": other}


_KINDS = ("compute", "communication", "recv")


def _tracks(events: list[Event]) -> list[int]:
    """A track for each event: its kind's, or the first further one without an event at its time."""
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


def write_chrome_trace(path: Place, events: Iterable[Event], *, title: str, dropped: int = 0) -> None:
    """Write `chrome_trace` as JSON, complete or not at all; it takes the place of the tails beside it.

    Size: some 200 bytes an event, so about 10 MB at most.
    """
    files.replace(path, json.dumps(chrome_trace(events, title=title, dropped=dropped)))
    files.remove_tails(path.parent)
