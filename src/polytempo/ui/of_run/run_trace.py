"""The parts of a run's trace that the page shows: the last steps as bars, and the bytes between workers as edges."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polytempo.core.system.files import METRICS, RESULT, TAIL, TAILS, is_folder
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.report.pages.validation import validation
from polytempo.report.pictures.timeline import WORDS, operation_colors
from polytempo.report.runs import read_events
from polytempo.worlds.trace import COMMUNICATION, OFF_THE_CLOCK, Event
from polytempo.worlds.trace_tail import EVERY_S, MOST_TAILS, read_tail

NUM_STEPS, MOST_RANKS, MOST_BARS = 4, 16, 3_000
_MOST_NODES, _MOST_EDGES = 64, 400
_SENT_BY_ALL = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}


class RunTrace:
    """The trace of a run, or of a run that goes on the tails of its ranks, read again when a file changes."""

    def __init__(self, folder: Place) -> None:
        self._folder, self._path = folder, folder / "trace.json"
        self.version: object = None
        """Another value after each change."""
        self.events: list[Event] = []
        self.goes_on = False
        """True if the events are the last ones of a run that goes on, or was killed."""
        self.timeline: dict[str, Any] | None = None
        """The last steps as bars; see `timeline`."""
        self._topology: tuple[object, dict[str, Any] | None] = None, None

    def topology(self, workers: int, names: dict[int, str]) -> dict[str, Any] | None:
        """Senders and receivers; see `topology`. Made once for each version of the trace."""
        asked = (self.version, workers, names)
        if self._topology[0] != asked:
            self._topology = asked, topology(self.events, workers, names)
        return self._topology[1]

    def look(self) -> bool:
        """Read a trace that has changed; True if there is one now that was not there before."""
        whole, tails = _version(self._path), _newest(self._folder)
        self.goes_on = bool(tails) and (not isinstance(whole, tuple) or max(tails.values()) > whole[0])
        version = tuple(tails.items()) if self.goes_on else whole
        if version == self.version:
            return False
        self.version = version
        try:
            whole_events = [] if version is None or self.goes_on else read_events(self._path)[0]
        except (ValueError, OSError):
            whole_events = []  # it is being written, or is not a run's
        self.events = in_common(_read(tails)) if self.goes_on else whole_events
        self.timeline = timeline(self.events)
        return True


def in_common(tails: Sequence[Sequence[Event]]) -> list[Event]:
    """The events of all ranks in the time that all tails tell of; where there is none, all events."""
    told = [tail for tail in tails if tail]
    begin_s = max((min(event.start_s for event in tail) for tail in told), default=0.0)
    end_s = min((max(event.end_s for event in tail) for tail in told), default=0.0)
    inside = [event for tail in told for event in tail if event.start_s >= begin_s and event.end_s <= end_s]
    return inside or [event for tail in told for event in tail]


def _newest(run: Place) -> dict[Path, int]:
    """The tails of ranks that go on, with the times of their writing in nanoseconds. None of a run that has ended."""
    folder = run / TAILS
    if isinstance(folder, UrlPath) or not is_folder(folder) or _has_ended(run):
        return {}
    found = dict[Path, int]()
    with suppress(OSError):
        for name in sorted(os.listdir(folder))[: 2 * MOST_TAILS]:
            if TAIL.fullmatch(name):
                found[folder / name] = (folder / name).lstat().st_mtime_ns
    newest = max(found.values(), default=0)
    return {path: at for path, at in found.items() if newest - at < 3e9 * EVERY_S}  # an earlier rank is left out


def _has_ended(run: Place) -> bool:
    """True if the last run in the folder has a result: a process that goes on does not count any more."""
    result, metrics = _version(run / RESULT), _version(run / METRICS)
    return isinstance(result, tuple) and (not isinstance(metrics, tuple) or result[0] >= metrics[0])


def _read(tails: Iterable[Path]) -> list[list[Event]]:
    found = list[list[Event]]()
    for path in tails:
        with suppress(ValueError, OSError, RecursionError):
            found.append(read_tail(path))
    return found


def timeline(events: Sequence[Event]) -> dict[str, Any] | None:
    """The last steps with a message between ranks: bars of operations, a row a rank. None without events."""
    shown = _last_steps(events)
    if not shown:
        return None
    begin_s = min(event.start_s for event in shown)
    steps = [event.step for event in shown if event.step >= 0] or [0]
    ops = sorted({event.op for event in shown}, key=lambda op: (op in COMMUNICATION, op))
    colors = operation_colors(ops)
    lanes = [any((op in COMMUNICATION) == talks for op in ops) for talks in (False, True)]
    return {
        "ranks": sorted({event.rank for event in shown}),
        "lanes": sum(lanes),
        "ops": [
            {
                "name": WORDS.get(op, op.replace("_", "-")),
                "color": colors[op],
                "lane": int(op in COMMUNICATION) if all(lanes) else 0,
            }
            for op in ops
        ],
        "begin_s": begin_s,
        "steps": [min(steps), max(steps)],
        "bars": [
            [
                event.rank,
                ops.index(event.op),
                _short(event.start_s - begin_s),
                _short(event.end_s - begin_s),
                event.step,
                event.bytes,
                event.peer,
            ]
            for event in shown
        ],
    }


def topology(events: Sequence[Event], workers: int, names: dict[int, str]) -> dict[str, Any] | None:
    """Senders and receivers with their bytes over the traced steps. None where the trace holds no message.

    A collective that the library performs as one operation has no edges: its bytes are each rank's own.
    """
    edges, together = Counter[tuple[int, int]](), Counter[str]()
    ranks = set[int]()
    for event in events:
        if event.op in COMMUNICATION and event.bytes > 0:
            ranks.add(event.rank)
            if event.peer >= 0:
                edges[event.rank, event.peer] += event.bytes
                ranks.add(event.peer)
            elif event.op in _SENT_BY_ALL:
                together[_SENT_BY_ALL[event.op]] += event.bytes
    nodes = sorted(ranks)[:_MOST_NODES]
    kept = [(pair, count) for pair, count in edges.most_common(_MOST_EDGES) if set(pair) <= set(nodes)]
    if not nodes:
        return None
    return {
        "nodes": [
            {"rank": rank, "name": names.get(rank, _name(rank, workers)), "worker": rank < workers} for rank in nodes
        ],
        "edges": [[source, target, count] for (source, target), count in kept],
        "together": [[op, count] for op, count in together.most_common()],
        "left_out": len(ranks) - len(nodes),
        "seconds": max(event.end_s for event in events) - min(event.start_s for event in events),
    }


def node_names(processes: Sequence[str]) -> dict[int, str]:
    """The names of nodes by their numbers, from names such as `worker-0`, `rank-1`, `shard-0-node-2`."""
    found = {}
    for name in processes:
        if match := re.fullmatch(r"(?:worker|rank|member)-(\d+)|.*-node-(\d+)", name):
            found[int(match[1] or match[2])] = name
    return found


def compared(predicted: Sequence[Event], measured: Sequence[Event]) -> dict[str, Any] | None:
    """A prediction beside the measurement: the median step, and each component. None without a step in common."""
    try:
        found = validation(predicted, measured)
    except ValueError:
        return None
    return {
        "step": [found.whole.predicted_s, found.whole.measured_s],
        "components": [[each.name, each.predicted_s, each.measured_s] for each in found.components],
    }


def _last_steps(events: Sequence[Event]) -> list[Event]:
    """The events of all ranks during the last steps of a rank in that ranks talk, and none scores or saves.

    The run's last step ends in a long wait for the others, so it is shown only where there are few.
    """
    ranks = set(sorted({event.rank for event in events})[:MOST_RANKS])
    stood = {event.step for event in events if event.op in OFF_THE_CLOCK}
    talking = sorted({e.step for e in events if e.op in COMMUNICATION and e.step >= 0} - stood)
    steps = sorted({event.step for event in events if event.step >= 0})
    last = talking[-2] if len(talking) > NUM_STEPS else talking[-1] if talking else steps[-1] if steps else -1
    kept = {step for step in steps if last - NUM_STEPS < step <= last} - stood or {last}
    inside = [event for event in events if event.step in kept]
    if not inside:
        return []
    begin_s, end_s = min(event.start_s for event in inside), max(event.end_s for event in inside)
    busiest = Counter(event.rank for event in inside).most_common(1)[0][0]
    if len({event.rank for event in inside}) < len(ranks):  # ranks with a server are at steps of their own
        own = [event for event in inside if event.rank == busiest]
        begin_s, end_s = min(event.start_s for event in own), max(event.end_s for event in own)
        inside = [
            event._replace(start_s=max(begin_s, event.start_s), end_s=min(end_s, event.end_s))
            for event in events
            if event.start_s < end_s and event.end_s > begin_s
        ]
    return [event for event in inside if event.rank in ranks][-MOST_BARS:]


def _name(rank: int, workers: int) -> str:
    return f"worker-{rank}" if rank < workers else f"server-{rank}"


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def _version(path: Place) -> object:
    if isinstance(path, UrlPath):
        return path.size() if path.is_file() else None
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size
