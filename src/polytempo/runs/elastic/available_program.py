"""How many workers an elastic run may have, as a program of the user's says it: a script that asks a cluster, say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

_EVERY_S = 2.0
_LONGEST_S = 20.0


class AvailableProgram:
    """Runs `program` every two seconds, beside the run, and answers the last number that it printed.

    Where it fails, prints something else, or takes more than 20 s, the number stays, and a note says why, once for
    each reason. Call `close` at the end.
    """

    def __init__(self, program: Path, workers: int) -> None:
        if not program.is_file():
            raise ValueError(f"available={program}: there is no such program")
        self._program, self._number = program.absolute(), workers
        self._process: subprocess.Popen[str] | None = None
        self._since_s = float("-inf")
        self._said: set[str] = set()

    def __call__(self) -> int:
        """The number, without waiting for the program."""
        now_s = time.monotonic()
        if self._process is None:
            if now_s - self._since_s >= _EVERY_S:
                self._begin(now_s)
        elif self._process.poll() is not None:
            self._read()
        elif now_s - self._since_s > _LONGEST_S:
            self.close()
            self._note(f"it takes more than {_LONGEST_S:g} s")
        return self._number

    def close(self) -> None:
        """End the program, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the program that the user names
                [str(self._program)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            self._note(str(error))

    def _read(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        printed, _ = process.communicate()
        if process.returncode:
            self._note(f"it ended with exit code {process.returncode}")
        elif not printed.strip().isdigit():
            self._note(f"it printed {printed.strip()[:80]!r}, and not a number")
        else:
            self._number = int(printed)

    def _note(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            print(f"note: {self._program}: {reason}; the run goes on with {self._number} workers", file=sys.stderr)
