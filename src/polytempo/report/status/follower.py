"""`MetricsFollower`: the rows of a run's metrics, each once, while the run goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import IO, Any

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath


class MetricsFollower:
    """Shows each row of a run's metrics once, while the run goes on.

    Rows from before this object are shown if `earlier`. A resumed run replaces the file: the rows that it keeps are
    shown. At a URL the file is read whole, at most every `every_s`, and only after its size has changed.
    """

    def __init__(
        self, metrics: Place, show: Callable[[dict[str, Any]], None], every_s: float = 0.0, *, earlier: bool = False
    ) -> None:
        self.path = metrics
        self._show, self._every_s = show, every_s
        self._file, self._read_bytes, self._look_at_s = 0, 0, 0.0
        self.behind = False
        """True if the last look left rows for the next one."""
        if not earlier:
            with suppress(OSError), self._opened() as (stream, self._file):
                self._read_bytes = stream.seek(0, os.SEEK_END)

    def look(self, *, last: bool = False, most_bytes: int | None = None) -> None:
        """Show the rows since the last look. `last`: look now, without waiting for `every_s`.

        most_bytes: show the rows of so many bytes, and leave the others for the next look. None: all.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s and not last:
            return
        self._look_at_s = now_s + self._every_s
        with suppress(OSError), self._opened() as (stream, file):  # the next look comes soon
            if file != self._file or stream.seek(0, os.SEEK_END) < self._read_bytes:
                self._file, self._read_bytes = file, 0
            stream.seek(self._read_bytes)
            content = stream.read(-1 if most_bytes is None else most_bytes)
            if most_bytes is not None and b"\n" not in content:
                content += stream.readline()
            self.behind = bool(stream.read(1))
            whole_lines, newline, _ = content.rpartition(b"\n")
            self._read_bytes += len(whole_lines) + len(newline)
            for line in whole_lines.splitlines():
                self._show(json.loads(line))

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], int]]:
        """The file, and a number that is another one after it was replaced."""
        if isinstance(self.path, UrlPath):
            unchanged = self.path.size() == self._read_bytes
            yield BytesIO(bytes(self._read_bytes) if unchanged else self.path.read(files.MAX_JSON_BYTES)), 0
            return
        with files.opened(self.path) as stream:
            yield stream, os.fstat(stream.fileno()).st_ino
