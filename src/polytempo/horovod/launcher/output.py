"""`OutputRelay`: the output of ranks, on the launcher's own standard output and error, and in files."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import IO

from polytempo.engines.engine import EngineProcess

_LINE = re.compile(rb"\[([^\]]*)\]<(stdout|stderr)>:")
_READ_BYTES = 1 << 20


class OutputRelay:
    """Call `forward` now and then. `folder`: further copies go to its files `rank.N/stdout` and `rank.N/stderr`."""

    def __init__(self, folder: Path | None = None, *, timestamps: bool = False) -> None:
        self._folder, self._timestamps = folder, timestamps
        self._logs: dict[Path, tuple[int, bytes]] = {}
        """The number of bytes read of each log, and the line that is not complete yet."""

    def follow(self, process: EngineProcess) -> None:
        """Forward the output of this process, too."""
        self._logs[process.log] = (0, b"")

    def forward(self, *, last: bool = False) -> None:
        """Forward new, whole lines. `last`: also the rest of a line."""
        for log in self._logs:
            while self._advance(log):
                pass
            if last and self._logs[log][1]:
                self._write(self._logs[log][1] + b"\n")
                self._logs[log] = (self._logs[log][0], b"")
        sys.stdout.flush()
        sys.stderr.flush()

    def _advance(self, log: Path) -> bool:
        begin, rest = self._logs[log]
        try:
            with log.open("rb") as file:
                file.seek(begin)
                text = file.read(_READ_BYTES)
        except FileNotFoundError:
            return False
        *lines, rest = (rest + text).split(b"\n")
        self._logs[log] = (begin + len(text), rest)
        for line in lines:
            self._write(line + b"\n")
        return bool(text)

    def _write(self, line: bytes) -> None:
        match = _LINE.match(line)
        to: IO[str] = sys.stdout if match is not None and match[2] == b"stdout" else sys.stderr
        when = time.ctime() if self._timestamps else ""
        to.write(when + line.decode(errors="backslashreplace"))
        if match is not None and self._folder is not None:
            path = self._folder / f"rank.{match[1].decode()}" / match[2].decode()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line[match.end() :])
