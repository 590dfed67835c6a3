"""`EventLog`: the file `events.jsonl` of a run's folder, with the records that are not rows of training.

launcher, or rank 0 without one ── start, fault, group, diagnosis, finish: a line each ──▶ events.jsonl ──▶ `stream`
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgspec

from polytempo.core.system import files
from polytempo.core.system.files import EVENTS
from polytempo.core.system.first_failure import FirstFailure
from polytempo.core.system.notice import Preempted
from polytempo.core.system.url_path import Place
from polytempo.report.status.line_file import LineFile
from polytempo.report.status.records import (
    RunFinished,
    RunStarted,
    RunState,
    StreamRecord,
    diagnosis_of,
    line_of,
    record_of,
    row_of,
)

_MOST_WHY = 300


class EventLog:
    """Appends records to `events.jsonl` in `folder`, behind the lines that are there unless it is `fresh`.

        with EventLog(folder) as events:
            events.append(ProcessEvent("worker-1", "was killed by SIGKILL", 12.3, "started again"))

    One process of a run writes: its launcher, or rank 0 without one. A line that a crash cut short is removed. A run
    goes on without a file that cannot be written: the first failure is a note on standard error. Threads may append.
    Cost: one write of some 150 bytes a record; at a URL a thread puts the whole object again, at most every 10 s.
    """

    def __init__(self, folder: Place, *, fresh: bool = False) -> None:
        path = folder / EVENTS
        self._lines: LineFile | None = None
        try:
            before = b"" if fresh or not path.exists() else files.read(path, files.MAX_JSON_BYTES)
            self._lines = LineFile(path, before[: before.rfind(b"\n") + 1])
        except OSError as error:
            print(f"note: {path} has no records: {files.problem(error, path)}", file=sys.stderr)

    def append(self, record: StreamRecord) -> None:
        """Append one record. ValueError for entries that readers refuse."""
        record_of(row_of(record))
        if self._lines is not None:
            self._lines.write(line_of(record).encode() + b"\n")
        if isinstance(record, RunFinished):
            self.close()

    def close(self) -> None:
        """Close the file; closing twice is harmless, and later records are left out."""
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def logged(
    folder: Place,
    start: RunStarted,
    *,
    resume: bool = False,
    settle: Callable[[BaseException], FirstFailure | None] = lambda error: None,
) -> Iterator[EventLog]:
    """The log of a run without a launcher: it has `start`, with this process, and at the end the finish.

    `settle` returns the first failure of a run that an error ends.
    """
    here: dict[str, Any] = {"began_s": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    with EventLog(folder, fresh=not resume) as events:
        resumed = resume and (folder / "checkpoint").exists()
        events.append(msgspec.structs.replace(start, **here, resumed=resumed or None))
        try:
            yield events
        except BaseException as error:
            if (death := settle(error)) is not None:
                events.append(diagnosis_of(death, time.time() - here["began_s"]))
            events.append(finish_of(error))
            raise
        events.append(finish_of(None))


def finish_of(error: BaseException | None) -> RunFinished:
    """The end of a run by `error`, with the error's first line."""
    if error is None:
        return RunFinished(state="finished")
    alone = isinstance(error, KeyboardInterrupt) and not isinstance(error, Preempted)
    said = "interrupted" if alone else str(error) or type(error).__name__
    state: RunState = "preempted" if isinstance(error, Preempted) else "failed"
    return RunFinished(state=state, why=said.partition("\n")[0][:_MOST_WHY])
