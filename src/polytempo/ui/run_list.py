"""`RunList`: the runs below a folder, each as a row of facts that a table shows, filters and sorts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from polytempo.core.system import files
from polytempo.core.system.files import EVENTS, RESULT, STATUS
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.report.runs import has_result, load_result
from polytempo.report.saved_plan import SUFFIX, read_plan
from polytempo.report.saved_trials import SUFFIX as TRIALS
from polytempo.report.saved_trials import SavedTrials, read_trials
from polytempo.report.status.live_status import launcher_lives
from polytempo.report.status.rows import last_rows
from polytempo.report.status.stream import FILES as GROWING
from polytempo.report.status.stream import status_in
from polytempo.ui.tagging import TAGS, settings_at_start, tags_in

FILES = (STATUS, RESULT, *GROWING)
"""Files that make a folder the folder of a run."""
ARCHIVE = "archived"
"""The folder below the root that archived runs move to."""
_NOT_RUNS = frozenset({*files.FOLDERS, ARCHIVE})
MOST_RUNS, _MOST_DEPTH, _MOST_FOLDERS = 2_000, 4, 20_000
_MOST_PLANS = 50
_MOST_LOCK, _MOST_TEXT, _MOST_SETTING = 1 << 16, 300, 100
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
        self._starts: dict[str, tuple[object, Mapping[str, str]]] = {}
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
        self._starts = {name: known for name, known in self._starts.items() if name in found}
        return sorted(rows, key=lambda row: (row["state"] != "running", -(row["changed_s"] or 0.0), row["id"]))

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The plans of `polytempo plan` among the runs, at the last look; the newest first, at most 50."""
        return self._saved(SUFFIX)

    @property
    def sweeps(self) -> list[dict[str, Any]]:
        """The sweeps and tunings among the runs, with their trials so far, as `plans` are."""
        return self._saved(TRIALS)

    def _saved(self, suffix: str) -> list[dict[str, Any]]:
        found = [plan for name, (_, plan) in self._plans.items() if plan is not None and name.endswith(suffix)]
        return sorted(found, key=lambda plan: -plan["changed_s"])

    def _plan(self, name: str, path: Path) -> tuple[object, dict[str, Any] | None]:
        version, known = version_of(path.parent, [path.name]), self._plans.get(name)
        if known is not None and known[0] == version:
            return known
        try:
            found = read_plan(path) if name.endswith(SUFFIX) else read_trials(path)
            plain = msgspec.to_builtins(found)
            if isinstance(found, SavedTrials):
                plain["best"] = None if found.best is None else found.best.number
        except (ValueError, OSError):
            return version, None
        return version, {**plain, "id": name, "changed_s": _changed_s(version) or 0.0}

    def _row(self, name: str, folder: Place) -> dict[str, Any]:
        version, tagged = version_of(folder), version_of(folder, [TAGS])
        known = self._known.get(name)
        if known is None or known[0] != (version, tagged) or known[1]["state"] == "running" or version is None:
            try:
                row = facts_of(folder)
            except (ValueError, OSError, RecursionError) as error:
                row = _unknown(f"{type(error).__name__}: {error}"[:_MOST_TEXT])
            settings = self._settings(name, folder)
            short = {key: text for key, text in settings.items() if key not in row and len(text) <= _MOST_SETTING}
            row |= {"settings": short, "tags": tags_in(folder, settings)}
            known = (version, tagged), {**row, "id": name, "name": folder.name, "changed_s": _changed_s(version)}
            self._known[name] = known
        return known[1]

    def _settings(self, name: str, folder: Place) -> Mapping[str, str]:
        """`settings_at_start`, read again where the run's events have changed, at a URL once."""
        version, known = version_of(folder, [EVENTS]), self._starts.get(name)
        if known is None or known[0] != version:
            found: dict[str, str] = {}
            with suppress(ValueError, OSError, RecursionError):
                found = settings_at_start(folder)
            if not found:
                return {}
            known = self._starts[name] = (version, found)
        return known[1]


def facts_of(folder: Place) -> dict[str, Any]:
    """The facts of one run, from its status, its result, or the end of its metrics. ValueError for other files."""
    result = load_result(folder) if has_result(folder) else {}
    status = status_in(folder)
    if status is None:  # rows alone, of an earlier version
        told = {row.get("kind"): row for row in last_rows(folder)}
        row, test = told.get("train", {}), told.get("test", {})
        lives = owner_lives(folder)
        state = "running" if lives else "gone" if lives is False else "unknown"
        found: dict[str, Any] = {"job": "", "strategy": "", "world": "", "workers": None, "why": ""}
        found |= {"samples_per_s": row.get("samples_per_s"), "began_s": None, "steps": None, "epochs": None}
        written_s = time.time()
    else:
        row, test = status.train or {}, status.test or {}
        state = "gone" if status.state == "running" and launcher_lives(status) is False else status.state
        names = ("job", "strategy", "world", "workers", "why", "steps", "epochs", "samples_per_s", "staleness")
        found = {name: getattr(status, name) for name in names}
        found |= {"began_s": status.began_s or None, "written_s": status.written_s or None}
        found |= {"hosts": len(status.hosts), "faults": status.num_events}
        written_s = status.written_s
    done = _done(row, found["steps"], found["epochs"])
    found |= {name: row.get(name) for name in ("samples", "seconds")}
    found |= {name: row.get(name) or test.get(name) for name in ("step", "epoch")}
    found |= {
        "train_loss": row.get("loss"),
        "loss": test.get("loss", row.get("loss")),
        "accuracy": test.get("accuracy"),
    }
    found |= {"state": state, "ended": bool(result), "done": 1.0 if state == "finished" else done}
    found |= {"eta_s": _eta_s(found["began_s"], written_s, done) if state == "running" else None}
    return found | {name: result[name] for name in _RESULTS if result.get(name) is not None}


def _unknown(why: str) -> dict[str, Any]:
    return {"job": "", "strategy": "", "world": "", "workers": None, "state": "unknown", "why": why, "ended": False}


def owner_lives(folder: Place) -> bool | None:
    """True if the process that holds the folder's lock is there; None where no lock says so, or from another host."""
    if isinstance(folder, UrlPath):
        return None
    for path in sorted(folder.glob(".lock-*.json"), reverse=True):
        with suppress(ValueError, OSError, RecursionError):
            owner = msgspec.json.decode(files.read(path, _MOST_LOCK), type=_Owner)
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
            saved = sorted(each for each in names if each.endswith((SUFFIX, TRIALS)))[
                : max(0, _MOST_PLANS - len(plans))
            ]
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
