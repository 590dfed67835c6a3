"""Profiles of ranks as one trace that Perfetto opens, and as a table.

profile/rank-0.json ┐                         rank 0 │ compute, communication, recv   (the run's trace)
profile/rank-1.json ┴─▶ profile.json, tracks         │ thread 1, thread 2, device 0   (torch.profiler)
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.worlds.trace import COMMUNICATION, WAITING, Event, chrome_trace

FOLDER, FILE = "profile", "profile.json"
_FIRST_TRACK = 1000
"""Tracks of torch's threads have numbers from here on."""
_MOST_BYTES = 64 << 20


class TorchCall(NamedTuple):
    """An operation of torch."""

    name: str
    thread: str
    start_s: float
    seconds: float


class RankProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """The recorded steps of one rank, `first` to `last` - 1."""

    rank: int
    host: str
    first: int
    last: int
    begin_s: float
    end_s: float
    slices: list[TorchCall]
    events: list[tuple[int, int, str, int, float, float, int]]
    dropped: int = 0
    """Short operations that are left out."""


class Total(NamedTuple):
    """The time of a rank in operations of one name."""

    name: str
    calls: int
    seconds: float
    """Self time, without the operations inside."""


def profiled_ranks(run: Place) -> list[Place]:
    """The files of ranks that have recorded steps."""
    folder = run / FOLDER
    found: list[Place] = list(folder.iterdir()) if folder.exists() else []
    return sorted((path for path in found if re.fullmatch(r"rank-\d+\.json", path.name)), key=str)


def read_profiles(run: Place) -> list[RankProfile]:
    """The profiles in the run's folder, by rank. ValueError where there are none, or a file is damaged."""
    found = [read_profile(path) for path in profiled_ranks(run)]
    if not found:
        raise ValueError(f"{run} has no profile; run it with --profile 20:30, which records steps 20 to 29")
    return sorted(found, key=lambda each: each.rank)


def read_profile(path: Place) -> RankProfile:
    """The profile in one file. ValueError where it is damaged."""
    try:
        return msgspec.json.decode(files.read(path, _MOST_BYTES), type=RankProfile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}; remove this file to see the others") from error


def merged(profiles: Sequence[RankProfile], title: str) -> dict[str, Any]:
    """The profiles in Chrome's trace format, from the first rank's begin on: a process a rank, a track a thread."""
    zero_s = min(each.begin_s for each in profiles)
    events = [_moved(Event(*line), zero_s) for each in profiles for line in each.events]
    trace = chrome_trace(events, title=title)
    names, slices = list[dict[str, Any]](), list[dict[str, Any]]()
    entries: Any = trace["traceEvents"]
    for entry in entries:
        (names if entry["ph"] == "M" else slices).append(entry)
    named = {entry["pid"]: entry for entry in names if entry["name"] == "process_name"}
    for each in profiles:
        if each.rank not in named:
            named[each.rank] = {"name": "process_name", "ph": "M", "pid": each.rank, "args": {}}
            names.append(named[each.rank])
        named[each.rank]["args"] = {"name": f"rank {each.rank} ({each.host})"}
        threads = {name: _FIRST_TRACK + i for i, name in enumerate(dict.fromkeys(part.thread for part in each.slices))}
        for name, track in threads.items():
            names.append({"name": "thread_name", "ph": "M", "pid": each.rank, "tid": track, "args": {"name": name}})
        for part in each.slices:
            slices.append(
                {
                    "name": part.name,
                    "cat": "torch",
                    "ph": "X",
                    "pid": each.rank,
                    "tid": threads[part.thread],
                    "ts": (part.start_s - zero_s) * 1e6,
                    "dur": part.seconds * 1e6,
                }
            )
    slices.sort(key=lambda entry: (entry["pid"], entry.get("tid", 0), entry["ts"], -entry.get("dur", 0.0)))
    dropped = sum(each.dropped for each in profiles)
    return {**trace, "traceEvents": names + slices, "otherData": {"title": title, "dropped": dropped}}


def _moved(event: Event, zero_s: float) -> Event:
    """The event on the profile's clock; an earlier begin is cut."""
    start_s = max(0.0, event.start_s - zero_s)
    return event._replace(start_s=start_s, end_s=max(start_s, event.end_s - zero_s))


def write_merged(run: Place, title: str) -> Place:
    """Write the ranks' profiles as one trace into the run's folder; its path."""
    files.replace(run / FILE, json.dumps(merged(read_profiles(run), title)))
    return run / FILE


def totals(slices: Iterable[TorchCall]) -> list[Total]:
    """The time of each name, the longest first: self time, so that their sum is the time in operations."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    outer: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for part in sorted(slices, key=lambda each: (each.thread, each.start_s, -each.seconds)):
        stack = outer[part.thread]
        while stack and stack[-1][1] <= part.start_s:
            stack.pop()
        if stack:
            seconds[stack[-1][0]] -= part.seconds
        calls[part.name] += 1
        seconds[part.name] += part.seconds
        stack.append((part.name, part.start_s + part.seconds))
    return sorted((Total(name, calls[name], seconds[name]) for name in calls), key=lambda each: -each.seconds)


def exchange_seconds(profile: RankProfile) -> tuple[float, float]:
    """Seconds in exchanges of any kind, and in receiving alone; overlaps count twice."""
    lines = [Event(*line) for line in profile.events]
    exchanged = sum(line.end_s - line.start_s for line in lines if line.op in COMMUNICATION)
    return exchanged, sum(line.end_s - line.start_s for line in lines if line.op in WAITING)
