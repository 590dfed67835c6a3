"""The reader of a run's lines: all rows of `metrics.jsonl`, the last lines of a file, or each line as it comes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import IO, Any

import msgspec

from polytempo.core.system import files
from polytempo.core.system.files import METRICS
from polytempo.core.system.url_path import Place, UrlPath

_NUMBERS = frozenset(
    {"step", "epoch", "samples", "seconds", "loss", "accuracy", "samples_per_s", "idle_share", "staleness"}
    | {"noise_trace", "gradient_square", "noise_scale", "lr"}
)
"""Entries of rows that readers calculate with."""
METRIC_KINDS = frozenset({"train", "test"})
"""Kinds of rows that are metrics of the run; other kinds are the user's own numbers, and checkpoints."""
_MOST, _SHOWN = 1e300, 40
_END_BYTES = 1 << 20
_SEAM_BYTES = 256


def read_metrics(run: Place) -> list[dict[str, Any]]:
    """The rows "train" and "test" of the run in the folder `run`, as in `read_rows`."""
    return [row for row in read_rows(run) if row.get("kind") in METRIC_KINDS]


def read_rows(run: Place, name: str = METRICS) -> list[dict[str, Any]]:
    """All rows in a file of a run; none where it has no such file.

    A last line that a crash cut short is left out. Errors: ValueError for a broken line before it.
    """
    path, rows = run / name, list[dict[str, Any]]()
    lines = files.read(path, files.MAX_JSON_BYTES).split(b"\n") if path.exists() else []
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            row = parsed_row(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}; remove that line to read the others") from error
        rows.append(row)
    return rows


def last_rows(run: Place, name: str = METRICS) -> list[dict[str, Any]]:
    """The rows in the last MiB of a file of the run. Broken lines are left out."""
    return list(_whole_rows(_end(run / name)))


def first_rows(run: Place, name: str = METRICS) -> list[dict[str, Any]]:
    """The rows in the first MiB of a file of the run. Broken lines are left out."""
    with suppress(OSError):
        return list(_whole_rows(files.read(run / name, _END_BYTES)))
    return []


def _end(path: Place) -> bytes:
    with suppress(OSError):
        if isinstance(path, UrlPath):
            return path.read(files.MAX_JSON_BYTES)[-_END_BYTES:]
        with files.opened(path) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _END_BYTES))
            return stream.read(_END_BYTES)
    return b""


def _whole_rows(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            yield parsed_row(line)


def parsed_row(line: bytes) -> dict[str, Any]:
    """The row in a line. ValueError unless it is JSON, without NaN, and a row of metrics."""
    try:
        row: dict[str, Any] = msgspec.json.decode(line)
    except msgspec.DecodeError:
        row = json.loads(line, parse_constant=_refused)  # its error names the place, or a NaN
    check_row(row)
    return row


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def check_row(row: Any) -> None:
    """ValueError unless it is a row of metrics: an object of numbers."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for name, value in row.items():
        if name not in _NUMBERS or value is None:
            continue
        if type(value) not in (int, float) or not abs(value) < _MOST:
            raise ValueError(f"{name} is {str(value)[:_SHOWN]!r}, and not a number")


class RowFollower:
    """Shows each line of a file of a run once, as a row, while the run goes on.

    Rows from before this object are shown if `earlier`. A resumed run replaces the file: the rows that it keeps are
    shown. At a URL the file is read whole, at most every `every_s`, and only after its size has changed.
    """

    def __init__(
        self,
        run: Place,
        show: Callable[[Any], None],
        every_s: float = 0.0,
        *,
        earlier: bool = False,
        name: str = METRICS,
        parse: Callable[[list[bytes]], Iterable[Any]] | None = None,
        on_broken: Callable[[bytes, Exception], None] | None = None,
    ) -> None:
        """`parse(lines)`: the items to show of whole lines, ValueError for a broken line; None: the rows.

        `on_broken(line, error)`: called with a whole line that is not a row; None: its error is raised.
        """
        self.path, self._parse, self._on_broken = run / name, parse, on_broken
        self._show, self._every_s = show, every_s
        self._file, self._read_bytes, self._look_at_s = 0, 0, 0.0
        self._seam = b""
        """The last bytes that were read: where others are at their place, the file was replaced."""
        self.behind = False
        """True if the last look left rows for the next one."""
        if not earlier:
            with suppress(OSError), self._opened() as (stream, self._file):
                self._read_bytes = stream.seek(0, os.SEEK_END)
                stream.seek(-min(self._read_bytes, _SEAM_BYTES), os.SEEK_END)
                self._seam = stream.read(_SEAM_BYTES)

    def look(self, *, last: bool = False, most_bytes: int | None = None) -> None:
        """Show the rows since the last look. `last`: look now, without waiting for `every_s`.

        most_bytes: show the rows of so many bytes, and leave the others for the next look. None: all.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s and not last:
            return
        self._look_at_s = now_s + self._every_s
        with suppress(OSError), self._opened() as (stream, file):  # the next look comes soon
            stream.seek(self._read_bytes - len(self._seam))
            if file != self._file or stream.read(len(self._seam)) != self._seam:
                self._file, self._read_bytes, self._seam = file, 0, b""
                stream.seek(0)
            content = stream.read(-1 if most_bytes is None else most_bytes)
            if most_bytes is not None and b"\n" not in content:
                content += stream.readline()
            self.behind = bool(stream.read(1))
            whole_lines, newline, _ = content.rpartition(b"\n")
            lines = whole_lines.split(b"\n") if newline else []
            rows = list(self._rows(lines) if self._parse is None else self._parse(lines))
            self._read_bytes += len(whole_lines) + len(newline)  # a broken line is read again until it is mended
            self._seam = (self._seam + whole_lines + newline)[-_SEAM_BYTES:]
            for found in rows:
                self._show(found)

    def _rows(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                row = parsed_row(line)
            except (ValueError, RecursionError) as error:
                if self._on_broken is None:
                    raise
                self._on_broken(line, error)
            else:
                yield row

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], int]]:
        """The file, and a number that is another one after it was replaced."""
        if isinstance(self.path, UrlPath):
            unchanged = self.path.size() == self._read_bytes
            read = bytes(self._read_bytes - len(self._seam)) + self._seam
            yield BytesIO(read if unchanged else self.path.read(files.MAX_JSON_BYTES)), 0
            return
        with files.opened(self.path) as stream:
            yield stream, os.fstat(stream.fileno()).st_ino
