"""`TimelineFile`: negotiations and operations over time, as a trace for Chrome and Perfetto. Rank 0 writes it.

each tensor is a row   |-NEGOTIATE_ALLREDUCE------|-ALLREDUCE------------------------------------------|
                         0      1  (ranks ready)    MEMCPY_IN_FUSION_BUFFER  SHARED_ALLREDUCE  MEMCPY_OUT…
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any

from polytempo.horovod.negotiation.message import Agreement, TensorRequest
from polytempo.worlds.process.threads import ended

_LOG = logging.getLogger("polytempo.horovod")
_WRITE_EVERY_S = 0.25
_MOST_EVENTS = 1 << 20
"""So many may wait to be written; further ones are left out, and counted."""

_Key = tuple[int, str]


class TimelineFile:
    """A file that is a JSON array of trace events whenever nothing is being written to it, and after `close`.

    Times are microseconds since it began. A thread writes, so no event waits for a disk. Names that were submitted
    before it began are left out. Errors: OSError where the file cannot be made.
    """

    def __init__(
        self, path: str | Path, *, mark_cycles: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.path = Path(path)
        self._mark_cycles, self._clock, self._start_s = mark_cycles, clock, clock()
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque()
        self._rows: dict[_Key, int] = {}
        self._open: dict[_Key, list[str]] = {}
        """The begun events of each tensor without an end, the innermost last."""
        self._agreed: set[_Key] = set()
        """Agreed tensors that are not performed yet."""
        self._early: dict[_Key, list[int]] = {}
        """Ranks that ask for such a name again already."""
        self._performed: list[_Key] = []
        self._left_out = 0
        self._file = self.path.open("wb")
        since_epoch = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        first = {"name": "process_name", "ph": "M", "pid": 0, "args": since_epoch}
        self._file.write(json.dumps([first]).encode())
        self._file.flush()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="polytempo-timeline", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ events from the runtime

    def ready(self, rank: int, requests: Iterable[TensorRequest]) -> None:
        """Rank 0 has heard that `rank` asks for these."""
        with self._lock:
            now = self._now()
            for request in requests:
                if request.key in self._agreed:
                    self._early.setdefault(request.key, []).append(rank)
                else:
                    self._ready(request.key, request.kind, rank, now)

    def cycle(self) -> None:
        """Rank 0 submits its gathered names."""
        if self._mark_cycles:
            with self._lock:
                self._add({"ph": "i", "name": "CYCLE_START", "ts": self._now(), "s": "g", "pid": 0})

    def agreed(self, requests: Iterable[TensorRequest]) -> None:
        """Their negotiation is over: they are performed next."""
        with self._lock:
            now = self._now()
            for request in requests:
                self._end_all(request.key, now)
                self._agreed.add(request.key)

    def refused(self, key: tuple[int, str]) -> None:
        """The negotiation is over, and the operation is not performed."""
        with self._lock:
            self._end_all(key, self._now())

    def begins(self, agreements: Sequence[Agreement]) -> None:
        """Begin the events of operations that are performed as one."""
        with self._lock:
            now = self._now()
            self._performed = [agreed.request.key for agreed in agreements]
            for agreed in agreements:
                request = agreed.request
                sizes = {"dtypes": list(request.dtypes), "shapes": [list(shape) for shape in request.shapes]}
                self._begin(request.key, request.kind.upper(), now, {**sizes, "fused": len(agreements)})

    def phase(self, name: str) -> None:
        """A phase of the operation begins, and the phase before it has ended."""
        with self._lock:
            now = self._now()
            for key in self._performed:
                if len(self._open.get(key, ())) > 1:
                    self._end(key, now)
                self._begin(key, name, now)

    def ends(self, agreements: Sequence[Agreement]) -> None:
        """End the events of performed operations."""
        with self._lock:
            now = self._now()
            for request in (agreed.request for agreed in agreements):
                self._end_all(request.key, now)
                self._agreed.discard(request.key)
                for rank in self._early.pop(request.key, ()):
                    self._ready(request.key, request.kind, rank, now)
            self._performed = []

    def close(self) -> None:
        """Write all events; open ones end now."""
        with self._lock:
            if self._closed.is_set():
                return
            now = self._now()
            for key in list(self._open):
                self._end_all(key, now)
            if self._left_out:
                self._events.append({"ph": "i", "name": f"{self._left_out} EVENTS LEFT OUT", "ts": now, "s": "g"})
            self._closed.set()
        ended(self._thread)

    # ------------------------------------------------------------------ events

    def _now(self) -> int:
        return int(1e6 * (self._clock() - self._start_s))

    def _ready(self, key: _Key, kind: str, rank: int, now: int) -> None:
        if key not in self._open:
            self._begin(key, f"NEGOTIATE_{kind.upper()}", now)
        self._add({"ph": "X", "name": str(rank), "ts": now, "dur": 0, "pid": self._row(key)})

    def _row(self, key: _Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows) + 1
            number, name = key
            shown = name if number == 0 else f"{name} (process set {number})"
            self._add({"name": "process_name", "ph": "M", "pid": row, "args": {"name": shown}})
            self._add({"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}})
        return row

    def _begin(self, key: _Key, name: str, now: int, args: dict[str, Any] | None = None) -> None:
        self._open.setdefault(key, []).append(name)
        event = {"ph": "B", "name": name, "ts": now, "pid": self._row(key)}
        self._add(event if args is None else {**event, "args": args})

    def _end(self, key: _Key, now: int) -> None:
        self._open[key].pop()
        self._add({"ph": "E", "ts": now, "pid": self._row(key)})

    def _end_all(self, key: _Key, now: int) -> None:
        while self._open.get(key):
            self._end(key, now)
        self._open.pop(key, None)

    def _add(self, event: dict[str, Any]) -> None:
        if self._closed.is_set():
            return
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)
        else:
            self._left_out += 1

    def _write_all(self) -> None:
        """The thread. A file that cannot be written ends the timeline, and nothing else."""
        try:
            with self._file:
                while not self._closed.wait(_WRITE_EVERY_S):
                    self._write()
                self._write()
        except OSError as error:
            _LOG.warning("the timeline %s ends, as it cannot be written: %s", self.path, error)
            self._closed.set()

    def _write(self) -> None:
        """New events replace the bracket that closes the array."""
        with self._lock:
            events, self._events = self._events, deque()
        if events:
            self._file.seek(-1, SEEK_END)
            self._file.write(("".join(f",\n{json.dumps(event)}" for event in events) + "]").encode())
            self._file.flush()
