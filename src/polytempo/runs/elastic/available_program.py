"""Programs of the user that an elastic run runs again and again: they print the allowed number of workers, or hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

_EVERY_S = 2.0
_LONGEST_S = 20.0
_END_S = 1.0
"""The time that a killed program has to end."""
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 20
_MOST_NOTES = 50

T = TypeVar("T")


class PolledProgram(Generic[T]):
    """Runs `program` every `every_s` seconds, beside the run. A call returns the answer of `read` to its last output.

    The last answer stays if the program fails, prints more than 1 MiB or text that `read` refuses by a ValueError, or
    takes more than 20 s. A note says why, once for each reason and at most 50 times; `goes_on` ends the note. Processes
    of the program end with it. No call waits for the program. Call `close` at the end.

    Errors: ValueError if there is no such program, or this user may not run it; the error names `option`.
    """

    def __init__(
        self,
        option: str,
        program: Path,
        first: T,
        read: Callable[[str], T],
        goes_on: Callable[[T], str],
        every_s: float,
    ) -> None:
        if not program.is_file():
            raise ValueError(f"{option}{program}: there is no such program")
        if not os.access(program, os.X_OK):
            raise ValueError(f"{option}{program} cannot be run as a program: chmod +x {program}")
        self._program, self._answer, self._reader, self._goes_on = program.absolute(), first, read, goes_on
        self._every_s = every_s
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = bytearray()
        self._since_s = float("-inf")
        self._said: set[str] = set()

    def __call__(self) -> T:
        """The last answer, without waiting for the program."""
        now_s = time.monotonic()
        if self._process is None:
            if now_s - self._since_s >= self._every_s:
                self._begin(now_s)
            return self._answer
        has_ended = self._process.poll() is not None  # first: then all that it has printed is in the pipe
        self._take_printed(self._process)
        if len(self._printed) > _MOST_BYTES:
            self.close()
            self._note(f"it prints more than {_MOST_BYTES >> 20} MiB")
        elif has_ended:
            self._read(self._process)
        elif now_s - self._since_s > _LONGEST_S:
            self.close()
            self._note(f"it takes more than {_LONGEST_S:g} s")
        return self._answer

    def close(self) -> None:
        """End the program and its processes, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.stdout is not None:
            process.stdout.close()

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._printed.clear()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the program that the user names
                [str(self._program)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
            )
        except OSError as error:
            self._note(str(error))
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _take_printed(self, process: subprocess.Popen[bytes]) -> None:
        """Read without waiting for the end of the pipe, which another program may hold."""
        assert process.stdout is not None
        with suppress(BlockingIOError):
            while len(self._printed) <= _MOST_BYTES and (more := os.read(process.stdout.fileno(), _READ_BYTES)):
                self._printed += more

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        assert process.stdout is not None
        process.stdout.close()
        if process.returncode:
            self._note(f"it ended with exit code {process.returncode}")
            return
        try:
            self._answer = self._reader(self._printed.decode(errors="replace"))
        except ValueError as error:
            self._note(str(error))

    def _note(self, reason: str) -> None:
        if reason not in self._said and len(self._said) < _MOST_NOTES:
            self._said.add(reason)
            print(
                f"note: {self._program}: {reason}; the run goes on with {self._goes_on(self._answer)}", file=sys.stderr
            )


class AvailableProgram(PolledProgram[int]):
    """The number of workers that `program` prints every two seconds; `workers` at first."""

    def __init__(self, program: Path, workers: int) -> None:
        super().__init__("available=", program, workers, _number, lambda number: f"{number} workers", _EVERY_S)


def _number(printed: str) -> int:
    if not printed.strip().isdecimal():
        raise ValueError(f"it printed {printed.strip()[:80]!r}, and not a number")
    return int(printed)
