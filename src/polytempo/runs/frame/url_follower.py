"""`UrlFollower`: reads the metrics of a run whose folder a URL names, while the run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from polytempo.core.system.files import MAX_JSON_BYTES
from polytempo.core.system.url_path import UrlPath


class UrlFollower:
    """Shows each row once. The object is read whole, at most every `every_s`, and only when it has grown."""

    def __init__(self, metrics: UrlPath, show: Callable[[dict[str, Any]], None], every_s: float = 5.0) -> None:
        self._metrics, self._show, self._every_s = metrics, show, every_s
        self._read_bytes = self._size()
        self._look_at_s = 0.0

    def look(self, *, last: bool = False) -> None:
        """Show the rows that have come since the last look. `last`: now, however soon after it."""
        now_s = time.monotonic()
        if now_s < self._look_at_s and not last:
            return
        self._look_at_s = now_s + self._every_s
        with suppress(OSError):  # the next look comes soon
            size = self._size()
            if size == self._read_bytes:
                return
            if size < self._read_bytes:
                self._read_bytes = 0
            whole_lines, newline, _ = self._metrics.read(MAX_JSON_BYTES)[self._read_bytes :].rpartition(b"\n")
            self._read_bytes += len(whole_lines) + len(newline)
            for line in whole_lines.splitlines():
                self._show(json.loads(line))

    def _size(self) -> int:
        try:
            return self._metrics.size()
        except FileNotFoundError:
            return 0
