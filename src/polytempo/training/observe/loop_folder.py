"""`LoopFolder`: the run's folder of a loop of one's own, `attach(…, out=…)`: start, the user's rows, end."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from polytempo.core.system import files
from polytempo.core.system.first_failure import FirstFailure
from polytempo.core.system.folder_lock import held
from polytempo.core.system.url_path import Place
from polytempo.report.status.event_log import EventLog, logged
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import RunStarted, diagnosis_of, row_of
from polytempo.report.status.row_exchanges import RankTotals, RowExchanges, TracedRank
from polytempo.trackers.tracked import tracked_loop
from polytempo.training.observe.user_log import UserLog, set_user_log
from polytempo.training.step.step_profiler import StepProfiler

_EVERY_S = 1.0
"""Seconds between two records of exchanges, so that a loop that logs in each step does not write twice as many rows."""


class LoopFolder:
    """Holds the folder `out` from its making to `close`, or to the end of the program. Files begin with the first row.

    They are new ones, unless the loop has loaded a state: then rows up to its step stay. `exchanged()`: the loop's step
    and this rank's exchanges so far. A record of them follows a row, at most once a second, and comes at the end.
    Errors: `FolderTaken`.
    """

    def __init__(
        self, out: Place, start: RunStarted, trackers: Sequence[Any], exchanged: Callable[[], tuple[int, RankTotals]]
    ) -> None:
        self._out, self._start, self._trackers = out, start, trackers
        self._stack = ExitStack()
        self._stack.enter_context(held(files.run_folder(out)))
        self._writer: MetricsWriter | None = None
        self._resumed_at: int | None = None
        self._closed = False
        atexit.register(self._at_exit)
        self._events: EventLog | None = None
        self._began_s = time.time()
        self._exchanged, self._exchanges, self._due_s = exchanged, RowExchanges(), 0.0
        self._exchanges.begin(*exchanged())

    def resumed(self, step: int) -> None:
        """The loop goes on after so many steps."""
        if self._writer is None:
            self._resumed_at = step
            self._exchanges.begin(step)

    def record(self, row: dict[str, Any]) -> None:
        """Write a row."""
        self._opened().write(row)
        if time.monotonic() >= self._due_s:
            self._write_exchanges()

    def _write_exchanges(self) -> None:
        self._due_s = time.monotonic() + _EVERY_S
        found = self._exchanges.since_last(*self._exchanged())
        if found is not None:
            self._opened().write(row_of(found))

    def died(self, death: FirstFailure) -> None:
        """Write the first failure of the ranks."""
        self._opened()
        if self._events is not None:
            self._events.append(diagnosis_of(death, time.time() - self._began_s))

    def close(self) -> None:
        """Write the end; closing twice is harmless."""
        self._end(None)

    def _at_exit(self) -> None:
        """Close the folder at the end of the program, perhaps by an exception."""
        self._end(getattr(sys, "last_value", None))

    def _end(self, error: BaseException | None) -> None:
        if not self._closed:
            atexit.unregister(self._at_exit)
            self._opened()
            self._write_exchanges()
            self._closed = True
            self._stack.__exit__(None if error is None else type(error), error, None)

    def _opened(self) -> MetricsWriter:
        if self._writer is None:
            resume = self._resumed_at is not None
            self._stack.enter_context(tracked_loop(self._start, self._trackers, self._out, resumed=resume))
            self._events = self._stack.enter_context(logged(self._out, self._start, resume=resume))
            writer = MetricsWriter(self._out, resumed_at=self._resumed_at)
            self._writer = self._stack.enter_context(writer)
        return self._writer


class LoopLog:
    """The user's log of an attached loop, and on rank 0 its folder. Without `out` every call is refused."""

    def __init__(self) -> None:
        self._folder: LoopFolder | None = None
        self._log: UserLog | None = None

    def begin(self, log: UserLog, folder: LoopFolder | None) -> None:
        """Write to `log`, and let `pt.log` write there."""
        self._log, self._folder = log, folder
        set_user_log(log)

    @property
    def log(self) -> UserLog:
        """ValueError unless `attach` was given a folder."""
        if self._log is None:
            raise ValueError("this loop has no folder to log into; give pt.attach or pt.pipeline one: out='runs/mine'")
        return self._log

    def resumed(self, step: int) -> None:
        """The loop goes on after so many steps."""
        if self._folder is not None:
            self._folder.resumed(step)

    def close(self) -> None:
        """Write the end of the run; later calls write nothing."""
        if self._log is not None:
            self._log.end()
        if self._folder is not None:
            self._folder.close()


class LoggingHandle:
    """The part of a loop's handle, or of its pipeline, that shows it."""

    def __init__(self, traced: Callable[[], TracedRank | None]) -> None:
        self.traced = traced
        """The world of this rank's exchanges; None before its server has begun."""
        self.loop_log = LoopLog()
        """The loop's folder, where it was given one."""
        self.profiler: StepProfiler | None = None
        """Records steps of the loop, where it was asked to."""

    def log(self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **numbers: Any) -> None:
        """Write numbers of your own into the folder `attach(…, out=…)`: `handle.log(perplexity=loss.exp())`.

        One rank's are written; see `pt.log`. `step`: by default the optimizer steps so far.
        """
        self.loop_log.log.log({**(values or {}), **numbers}, step)

    def log_text(self, name: str, text: str, *, step: int | None = None) -> None:
        """Write a text there; see `training.log_text`."""
        self.loop_log.log.log_text(name, text, step)

    def log_image(self, name: str, image: Any, *, step: int | None = None) -> None:
        """Write a picture there; see `training.log_image`."""
        self.loop_log.log.log_image(name, image, step)
