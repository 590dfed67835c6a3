"""`RunList`: the runs below a folder, each as a row of facts that a table shows, filters and sorts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.report.runs import load_result
from polytempo.report.saved_plan import SUFFIX, read_plan
from polytempo.report.status.event_log import FILE as EVENTS
from polytempo.report.status.live_status import (
    launcher_lives,
    process_lives,
    read_status,
    status_of_result,
)
from polytempo.report.status.metrics import check_row
from polytempo.report.status.records import RunFinished, RunStarted, StreamRecord, record_of

FILES = ("live.json", "result.json", "metrics.jsonl", EVENTS)
"""Files that make a folder the folder of a run."""
GROWING = ("metrics.jsonl", EVENTS)
"""Files that a run appends to."""
ARCHIVE = "archived"
"""The folder below the root that archived runs move to."""
_NOT_RUNS = frozenset({*files.FOLDERS, ARCHIVE})
MOST_RUNS, _MOST_DEPTH, _MOST_FOLDERS = 2_000, 4, 20_000
_MOST_PLANS = 50
_TAIL_BYTES, _MOST_TEXT = 1 << 16, 300
_RESULTS = ("batch_size", "seed", "threads", "bytes_sent_per_rank", "communication_share", "loss", "accuracy")


class RunList:
    """The runs below `root`, which is a run's own folder or holds runs, at most four folders deep. Links are left out.

        rows = RunList(Path("runs")).look()

    Cost of a look: a listing of each folder, and the files of runs that have changed.
    """

    def __init__(self, root: Place) -> None:
        self.root = root
        self.folders: dict[str, Place] = {}
        """The runs' folders by their names, which are paths below the root; the root itself is `.`."""
        self._known: dict[str, tuple[object, dict[str, Any]]] = {}
        self._plans: dict[str, tuple[object, dict[str, Any] | None]] = {}

    def look(self) -> list[dict[str, Any]]:
        """The rows of all runs now: running ones first, then by their time."""
        found: dict[str, Place] = {}
        rows = []
        plans: dict[str, Path] = {}
        for name, folder in _runs(self.root, plans):
            if len(found) == MOST_RUNS:
                break
            found[name] = folder
            rows.append(self._row(name, folder))
        self.folders = found
        self._plans = {name: self._plan(name, path) for name, path in sorted(plans.items())}
        self._known = {name: known for name, known in self._known.items() if name in found}
        return sorted(rows, key=lambda row: (row["state"] != "running", -(row["changed_s"] or 0.0), row["id"]))

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The plans of `polytempo plan` among the runs, at the last look; the newest first, at most 50."""
        found = [plan for _, plan in self._plans.values() if plan is not None]
        return sorted(found, key=lambda plan: -plan["changed_s"])

    def _plan(self, name: str, path: Path) -> tuple[object, dict[str, Any] | None]:
        version, known = version_of(path.parent, [path.name]), self._plans.get(name)
        if known is not None and known[0] == version:
            return known
        try:
            plain = msgspec.to_builtins(read_plan(path))
        except (ValueError, OSError):
            return version, None
        return version, {**plain, "id": name, "changed_s": _changed_s(version) or 0.0}

    def _row(self, name: str, folder: Place) -> dict[str, Any]:
        version = version_of(folder)
        known = self._known.get(name)
        if known is None or known[0] != version or known[1]["state"] == "running" or version is None:
            try:
                row = facts_of(folder)
            except (ValueError, OSError, RecursionError) as error:
                row = _unknown(f"{type(error).__name__}: {error}"[:_MOST_TEXT])
            known = version, {**row, "id": name, "name": folder.name, "changed_s": _changed_s(version)}
            self._known[name] = known
        return known[1]


def facts_of(folder: Place) -> dict[str, Any]:
    """The facts of one run, from its status, its result, or the end of its metrics. ValueError for other files."""
    result = load_result(folder) if (folder / "result.json").is_file() else {}
    status = read_status(folder)
    if status is None and result:
        status = status_of_result(result, [])
    if status is None:
        return _from_rows(folder)
    row, test = status.train or {}, status.test or {}
    state = "gone" if status.state == "running" and launcher_lives(status) is False else status.state
    done = _done(row, status.steps, status.epochs)
    found = {
        "job": status.job,
        "strategy": status.strategy,
        "world": status.world,
        "workers": status.workers,
        "state": state,
        "why": status.why,
        "step": row.get("step") or test.get("step"),
        "steps": status.steps,
        "epoch": row.get("epoch") or test.get("epoch"),
        "epochs": status.epochs,
        "loss": test.get("loss", row.get("loss")),
        "train_loss": row.get("loss"),
        "accuracy": test.get("accuracy"),
        "samples": row.get("samples"),
        "seconds": row.get("seconds"),
        "samples_per_s": status.samples_per_s,
        "staleness": status.staleness,
        "hosts": len(status.hosts),
        "faults": status.num_events,
        "began_s": status.began_s or None,
        "written_s": status.written_s or None,
        "done": 1.0 if state == "finished" else done,
        "eta_s": _eta_s(status.began_s, status.written_s, done) if state == "running" else None,
        "ended": bool(result),
    }
    return found | {name: result[name] for name in _RESULTS if result.get(name) is not None}


def _unknown(why: str) -> dict[str, Any]:
    return {"job": "", "strategy": "", "world": "", "workers": None, "state": "unknown", "why": why, "ended": False}


def _from_rows(folder: Place) -> dict[str, Any]:
    """The facts of a run that has left rows and events only, such as a simulation that goes on."""
    start, finish = ends_of(folder / EVENTS)
    last: dict[str, dict[str, Any]] = {}
    for row in _lines(_tail(folder / "metrics.jsonl")):
        last[str(row.get("kind"))] = row
    row, test = last.get("train", {}), last.get("test", {})
    found = {
        **_unknown(""),
        "step": row.get("step"),
        "epoch": row.get("epoch"),
        "samples": row.get("samples"),
        "seconds": row.get("seconds"),
        "loss": test.get("loss", row.get("loss")),
        "train_loss": row.get("loss"),
        "accuracy": test.get("accuracy"),
        "samples_per_s": row.get("samples_per_s"),
    }
    lives = owner_lives(folder)
    if start is not None:
        names = ("job", "strategy", "world", "workers", "steps", "epochs", "began_s")
        found |= {name: getattr(start, name) for name in names}
        if start.host is not None and start.pid is not None:
            lives = process_lives(start.host, start.pid)
    state = "running" if lives else "gone" if lives is False else "unknown"
    found |= {"state": state} if finish is None else {"state": finish.state, "why": finish.why}
    done = _done(row, found.get("steps"), found.get("epochs"))
    running = found["state"] == "running"
    return found | {"done": done, "eta_s": _eta_s(found.get("began_s"), time.time(), done) if running else None}


def ends_of(path: Place) -> tuple[RunStarted | None, RunFinished | None]:
    """The last start of a run among its first and last events, and its end after it."""
    start: RunStarted | None = None
    finish: RunFinished | None = None
    if not path.exists():
        return start, finish
    head = files.read(path, _TAIL_BYTES)
    for line in _lines(head if len(head) < _TAIL_BYTES else head + b"\n" + _tail(path)):
        with suppress(ValueError, RecursionError):
            record: StreamRecord | None = record_of(line)
            if isinstance(record, RunStarted):
                start, finish = record, None
            elif isinstance(record, RunFinished):
                finish = record
    return start, finish


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The rows among the lines. A cut first line is left out."""
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            check_row(row)
            yield row


def owner_lives(folder: Place) -> bool | None:
    """True if the process that holds the folder's lock is there; None where no lock says so, or from another host."""
    if isinstance(folder, UrlPath):
        return None
    for path in sorted(folder.glob(".lock-*.json"), reverse=True):
        with suppress(ValueError, OSError, RecursionError):
            owner = msgspec.json.decode(files.read(path, _TAIL_BYTES), type=_Owner)
            if owner.host == os.uname().nodename and owner.pid > 0:
                return _lives(owner.pid)
    return False if not any(folder.glob(".lock-*.json")) else None


class _Owner(msgspec.Struct):
    host: str
    pid: int


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _done(row: dict[str, Any], steps: int | None, epochs: float | None) -> float | None:
    """The finished part of the run, 0 to 1: it ends after its steps or its epochs, whichever come first."""
    counted = ((row.get("step"), steps), (row.get("epoch"), epochs))
    parts = [done / of for done, of in counted if done is not None and of]
    return min(1.0, max(parts)) if parts else None


def _eta_s(began_s: float | None, written_s: float, done: float | None) -> float | None:
    """The seconds that are left at the pace since the run's start, where `done` was done at `written_s`."""
    if not done or not began_s:
        return None
    left_s = max(0.0, written_s - began_s) * (1 - done) / done
    return max(0.0, left_s - max(0.0, time.time() - written_s))


def _runs(root: Place, plans: dict[str, Path]) -> Iterator[tuple[str, Place]]:
    """The folders of runs below `root`, in order; `plans` takes files of plans. A comparison's runs are below it."""
    waiting: list[tuple[str, Place, int]] = [(".", root, 0)]
    looked = 0
    while waiting and looked < _MOST_FOLDERS:
        name, folder, depth = waiting.pop(0)
        looked += 1
        names, below = _listing(folder)
        if not names.isdisjoint(FILES):
            yield name, folder
        if isinstance(folder, Path):
            saved = sorted(each for each in names if each.endswith(SUFFIX))[: max(0, _MOST_PLANS - len(plans))]
            plans.update({each if name == "." else f"{name}/{each}": folder / each for each in saved})
        if depth < _MOST_DEPTH:
            inner = (each for each in below if each not in _NOT_RUNS and not each.startswith("."))
            waiting += [(each if name == "." else f"{name}/{each}", folder / each, depth + 1) for each in inner]


def _listing(folder: Place) -> tuple[set[str], list[str]]:
    """The names of plain files in a folder, and the names of its folders; links are neither."""
    if isinstance(folder, UrlPath):
        names = folder.names()
        found = set(names)
        return found, [] if not found.isdisjoint(FILES) else [each for each in names if "." not in each]
    plain, below = set[str](), list[str]()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                plain.add(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
    return plain, sorted(below)


def version_of(folder: Place, names: Sequence[str] = FILES) -> tuple[tuple[int, int], ...] | None:
    """Times and sizes of the run's files; None where a place has none."""
    if isinstance(folder, UrlPath):
        return None
    found = []
    for name in names:
        try:
            about = (folder / name).lstat()
            found.append((about.st_mtime_ns, about.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def _changed_s(version: tuple[tuple[int, int], ...] | None) -> float | None:
    return max(time_ns for time_ns, _ in version) / 1e9 if version else None


def _tail(path: Place) -> bytes:
    """The last whole lines of a file, 64 KiB at most."""
    if isinstance(path, UrlPath):
        return path.read(files.MAX_JSON_BYTES)[-_TAIL_BYTES:]
    with suppress(OSError), files.opened(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        return stream.read(_TAIL_BYTES)
    return b""
