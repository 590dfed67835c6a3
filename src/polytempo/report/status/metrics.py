"""Metrics as JSON lines: one row for every report of a run's progress.

A filesystem that takes whole objects only gets the grown object again now and then (`GrownObject`).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath

_NUMBERS = frozenset(
    {"step", "epoch", "samples", "seconds", "loss", "accuracy", "samples_per_s", "idle_share", "staleness"}
    | {"noise_trace", "gradient_square", "noise_scale"}
)
"""Entries of rows that readers calculate with."""
METRICS = frozenset({"train", "test"})
"""Kinds of rows that are metrics of the run; other kinds are the user's own numbers, and checkpoints."""
_MOST, _SHOWN = 1e300, 40


class MetricsWriter:
    """Writes `metrics.jsonl`, one flushed line a row, so that a crash loses at most the line being written.

    A new run starts an empty file. A run resumed at step `resumed_at` keeps the rows up to that step and drops rows
    beyond it, which it will write again; of rows about tests also rows of `scored_again` samples and more. Where a URL
    names the file, it is put again now and then, and at the end (see `GrownObject`).

        with MetricsWriter(folder / "metrics.jsonl") as metrics:
            metrics.write({"kind": "train", "step": 1, "loss": 2.3})
    """

    def __init__(self, path: Place, *, resumed_at: int | None = None, scored_again: float = math.inf) -> None:
        kept = [] if resumed_at is None or not path.exists() else read_rows(path)
        kept = [row for row in kept if row.get("kind") != "test" or row["samples"] < scored_again]
        lines = [row_line(row) for row in kept if resumed_at is not None and row["step"] <= resumed_at]
        self._closed = False
        if isinstance(path, UrlPath):
            near = path.url.startswith("polytempo:")  # in the launcher's folder, who shows the rows
            grown = GrownObject(path, b"".join(lines), every_s=1.0 if near else 10.0)
            self._append: Callable[[bytes], None] = grown.write
            self._close: Callable[[], None] = grown.close
            return
        with files.aside(path) as stream:
            stream.writelines(lines)
        appended = files.append(path)
        self._append, self._close = lambda line: files.write(appended, line, path), appended.close

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Numbers that are not finite become null: JSON has no others."""
        self._append(row_line(row))

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Place) -> list[dict[str, Any]]:
    """The rows "train" and "test" of `path`, as in `read_rows`."""
    return [row for row in read_rows(path) if row.get("kind") in METRICS]


def read_rows(path: Place) -> list[dict[str, Any]]:
    """The rows of `path`. A last line that a crash cut short is left out; a broken line before it is an error."""
    rows: list[dict[str, Any]] = []
    lines = files.read(path, files.MAX_JSON_BYTES).split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            check_row(row)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}; remove that line to read the others") from error
        rows.append(row)
    return rows


def check_row(row: Any) -> None:
    """ValueError unless it is a row of metrics: an object of numbers."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for name in _NUMBERS & row.keys():
        value = row[name]
        if value is not None and (type(value) not in (int, float) or not abs(value) < _MOST):
            raise ValueError(f"{name} is {str(value)[:_SHOWN]!r}, and not a number")


def row_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON; values that are not finite are null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


_LAST_TRIES = 3


class GrownObject:
    """An object that grows. A thread puts appended bytes at most every `every_s`, and all of them at the end.

    A process that is killed loses at most the rows of that time. A put that fails is tried again with the
    next one; only the last one's error is raised, by `close`.
    """

    def __init__(self, path: UrlPath, content: bytes = b"", *, every_s: float = 10.0) -> None:
        self._path, self._every_s = path, every_s
        self._content, self._changed = bytearray(content), True
        self._lock, self._over = threading.Lock(), threading.Event()
        self._put()
        self._thread = threading.Thread(target=self._work, name="polytempo-metrics", daemon=True)
        self._thread.start()

    def write(self, content: bytes) -> None:
        """Append; this never waits for the filesystem."""
        with self._lock:
            self._content += content
            self._changed = True

    def close(self) -> None:
        """Put the rest. OSError if that cannot be done."""
        self._over.set()
        self._thread.join()
        for number in range(1, _LAST_TRIES + 1):
            try:
                return self._put()
            except OSError:
                if number == _LAST_TRIES:
                    raise

    def _work(self) -> None:
        while not self._over.wait(self._every_s):
            with suppress(OSError):
                self._put()

    def _put(self) -> None:
        with self._lock:
            content, changed, self._changed = bytes(self._content), self._changed, False
        if not changed:
            return
        try:
            self._path.write(content)
        except OSError:
            self._changed = True
            raise
