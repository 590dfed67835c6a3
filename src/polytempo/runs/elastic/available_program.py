"""Programs of the user's that an elastic run asks again and again: how many workers, or which hosts, there may be."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_EVERY_S = 2.0
_LONGEST_S = 20.0

T = TypeVar("T")


class PolledProgram(Generic[T]):
    """Runs `program` every `every_s` seconds, beside the run, and answers what `read` made of its last output.

    Where it fails, prints what `read` refuses by a ValueError, or takes more than 20 s, the last answer stays, and a
    note says why, once for each reason; `goes_on` ends the note. Call `close` at the end.
    """

    def __init__(
        self,
        program: Path,
        first: T,
        read: Callable[[str], T],
        goes_on: Callable[[T], str],
        every_s: float = _EVERY_S,
    ) -> None:
        self._program, self._answer, self._reader, self._goes_on = program.absolute(), first, read, goes_on
        self._every_s = every_s
        self._process: subprocess.Popen[str] | None = None
        self._since_s = float("-inf")
        self._said: set[str] = set()

    def __call__(self) -> T:
        """The last answer, without waiting for the program."""
        now_s = time.monotonic()
        if self._process is None:
            if now_s - self._since_s >= self._every_s:
                self._begin(now_s)
        elif self._process.poll() is not None:
            self._read()
        elif now_s - self._since_s > _LONGEST_S:
            self.close()
            self._note(f"it takes more than {_LONGEST_S:g} s")
        return self._answer

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
            return
        try:
            self._answer = self._reader(printed)
        except ValueError as error:
            self._note(str(error))

    def _note(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            print(
                f"note: {self._program}: {reason}; the run goes on with {self._goes_on(self._answer)}", file=sys.stderr
            )


class AvailableProgram(PolledProgram[int]):
    """How many workers there may be: a number that `program` prints, asked every two seconds; `workers` at first."""

    def __init__(self, program: Path, workers: int) -> None:
        if not program.is_file():
            raise ValueError(f"available={program}: there is no such program")
        super().__init__(program, workers, _number, lambda number: f"{number} workers")


def _number(printed: str) -> int:
    if not printed.strip().isdigit():
        raise ValueError(f"it printed {printed.strip()[:80]!r}, and not a number")
    return int(printed)
