"""`RowsInMemory`: the rows of a run without a folder, from a forked worker to the launcher that shows them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from polytempo.report.status.metrics import row_line


class RowsInMemory:
    """A file in memory, which workers inherit: no end of a process leaves anything behind, and no worker waits for the
    launcher. Cost: some 200 bytes a row, until `close`.
    """

    def __init__(self, show: Callable[[dict[str, Any]], None]) -> None:
        self._file = os.memfd_create("polytempo-rows")
        self._show, self._read_bytes = show, 0

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; called in one worker."""
        os.write(self._file, row_line(row))

    def look(self, *, last: bool = False) -> None:
        """Show the rows since the last look."""
        content = os.pread(self._file, os.fstat(self._file).st_size - self._read_bytes, self._read_bytes)
        whole_lines, newline, _ = content.rpartition(b"\n")
        self._read_bytes += len(whole_lines) + len(newline)
        for line in whole_lines.splitlines():
            self._show(json.loads(line))

    def close(self) -> None:
        """Give the memory back, once the workers have ended, too."""
        os.close(self._file)
