"""Progress of long work: a bar and a chart in a notebook; on standard error a bar on a terminal, else plain lines.

`Forecast` tells how long runs that follow each other still take, from their progress so far.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from polytempo.report.pages.summary import human_seconds
from polytempo.report.status.notebook_view import NotebookView, in_kernel
from polytempo.spec.text.plain_text import plain_text

BAR_INTERVAL_S = 0.1
NOTEBOOK_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 3.0
"""Plain lines come no faster than this; the last state is always shown."""


class Progress:
    """Shows how far runs have come, and about how long they still take. It never writes to standard output.

    Without a `stream`, a Jupyter kernel shows it below the cell.

    One object may show several runs in turn, each between `start` and `finish`; `num_runs` says how many are to come.

        with Progress() as progress:
            progress.start(400, "local_sgd(period=8)")
            progress.update(1, loss=2.3, accuracy=None, samples_per_s=21_000.0)
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_runs: int = 1,
    ) -> None:
        self._stream = stream or sys.stderr
        self._in_kernel = stream is None and in_kernel()
        self._view: NotebookView | None = None
        self._clock = clock
        self._num_runs = num_runs
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._total_steps: int | None = None
        self._total_epochs: float | None = None
        self._at_most = False
        self._description = self._status = ""
        self._forecast = Forecast(num_runs)
        self._told_s = clock()
        self._untold = ""

    def start(
        self, total_steps: int | None, description: str, *, total_epochs: float | None = None, at_most: bool = False
    ) -> None:
        """Begin a run named `description`, of `total_steps` and `total_epochs` (None: unknown); `at_most`: or fewer."""
        self.finish()
        self._forecast.begin(self._clock())
        number = f"[{self._forecast.number}/{self._num_runs}] " if self._num_runs > 1 else ""
        self._total_steps, self._description = total_steps, number + plain_text(description)
        self._total_epochs, self._at_most, self._status = total_epochs, at_most, ""
        if self._in_kernel:
            self._view = NotebookView(self._description)
        elif _is_terminal(self._stream):
            self._bar = _bar(self._stream)
            total = None if total_steps is None and self._total_epochs is None else 1.0
            self._task = self._bar.add_task(self._description, total=total, status="")
            self._bar.start()
        else:
            self._tell(f"{self._description}: started")

    def update(
        self,
        step: int,
        loss: float | None,
        accuracy: float | None,
        samples_per_s: float | None,
        *,
        epoch: float | None = None,
    ) -> None:
        """The run has done `step` steps and `epoch` epochs. A None is not shown."""
        done = self._done(step, epoch)
        left_s = None if done is None else self._forecast.left_s(done, self._clock())
        self._status = status = status_line(step, self._total_steps, loss, accuracy, samples_per_s)
        left = "" if left_s is None else f", {time_left(left_s, at_most=self._at_most)}"
        if self._view is not None:
            self._view.add(step, loss, done, status + left)
            if self._clock() - self._told_s >= NOTEBOOK_INTERVAL_S:
                self._view.show()
                self._told_s = self._clock()
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done or 0.0, status=status + left)
            if self._clock() - self._told_s >= BAR_INTERVAL_S:
                self._bar.refresh()
                self._told_s = self._clock()
            return
        line = f"{self._description}: {status}"
        if self._clock() - self._told_s >= PLAIN_INTERVAL_S:
            self._tell(line + left)
        else:
            self._untold = line  # told when the run has ended, so nothing is left of it

    def _done(self, step: int, epoch: float | None) -> float | None:
        """The finished part of the run, from 0 to 1: it ends after its steps or its epochs, whichever come first."""
        by_steps = step / self._total_steps if self._total_steps else None
        by_epochs = epoch / self._total_epochs if epoch is not None and self._total_epochs else None
        parts = [part for part in (by_steps, by_epochs) if part is not None]
        return min(1.0, max(parts)) if parts else None

    def note(self, text: str) -> None:
        """Say `text` on a line of its own, immediately."""
        if self._view is not None:
            self._view.note(plain_text(text))
        elif self._bar is not None:
            self._bar.console.print(plain_text(text), markup=False, highlight=False)
        else:
            self._tell(plain_text(text))

    def complete(self) -> None:
        """The run has ended well: its bar is full, although its last row may be of an earlier step."""
        if self._view is not None:
            self._view.complete(self._status)
        elif self._bar is not None:
            self._bar.update(self._task, total=1.0, completed=1.0, status=self._status)

    def finish(self) -> None:
        """End the run that was started, if there is one; the last state stays to be read."""
        self._forecast.end(self._clock())
        if self._view is not None:
            self._view.show()
            self._view = None
        elif self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._untold:
            self._tell(self._untold)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()

    def _tell(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._told_s, self._untold = self._clock(), ""


def shown_progress(progress: Progress | None, num_runs: int = 1) -> Progress | None:
    """`progress`; without one, a notebook shows `num_runs` runs, and other programs show nothing."""
    return Progress(num_runs=num_runs) if progress is None and in_kernel() else progress


def status_line(
    step: int, total_steps: int | None, loss: float | None, accuracy: float | None, samples_per_s: float | None
) -> str:
    """One moment of a run in words: `step 120/440, loss 0.213, accuracy 95.1 %, 38,200 samples/s`."""
    parts = [f"step {step:,}" + (f"/{total_steps:,}" if total_steps is not None else "")]
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    if accuracy is not None:
        parts.append(f"accuracy {100 * accuracy:.1f} %")
    if samples_per_s is not None:
        parts.append(f"{samples_per_s:,.0f} samples/s")
    return ", ".join(parts)


def time_left(seconds: float, *, at_most: bool = False) -> str:
    """The remaining time, in whole seconds: `about 12 s left`, `at most 4 min 05 s left`."""
    return f"{'at most' if at_most else 'about'} {human_seconds(max(1, round(seconds)))} left"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def _bar(stream: TextIO) -> Bar:
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}", markup=False),
        TimeElapsedColumn(),
        console=Console(file=stream, force_terminal=True),
        auto_refresh=False,  # no thread of its own: workers are started while the bar is shown
        redirect_stdout=False,  # a program's own output is not ours to move to standard error
        redirect_stderr=False,
    )


MIN_OBSERVED_S = 1.0
"""A run is watched for so long before anything is said of its end."""


class Forecast:
    """The time left to `num_runs` runs, one after the other. Times are seconds of any one clock.

    A run goes on as fast as it went since its first report, so that starting its processes (or the part that it was
    resumed with) does not count; the runs after it take as long as those before it did on average.
    """

    def __init__(self, num_runs: int = 1) -> None:
        self.number = 0
        """Number of the run that goes on, from 1."""
        self._num_runs = num_runs
        self._took_s: list[float] = []
        self._began_s: float | None = None
        self._first: tuple[float, float] | None = None
        self._done = 0.0

    def begin(self, now_s: float) -> None:
        """The next run begins."""
        self.end(now_s)
        self.number += 1
        self._began_s, self._first, self._done = now_s, None, 0.0

    def end(self, now_s: float) -> None:
        """The run that goes on, if there is one, has ended."""
        if self._began_s is not None:
            self._took_s.append(now_s - self._began_s)
        self._began_s = None

    def left_s(self, done: float, now_s: float) -> float | None:
        """The seconds until all runs have ended, where `done` (0 to 1) of this one is done. None: it cannot be told."""
        self._done = done = max(done, self._done)  # reports of several workers do not come in order
        if self._first is None:
            self._first = done, now_s
        first_done, first_s = self._first
        if self._began_s is None or done <= first_done or now_s - first_s < MIN_OBSERVED_S:
            return None
        rest_s = (now_s - first_s) * (1 - done) / (done - first_done)
        all_s = [*self._took_s, now_s - self._began_s + rest_s]
        coming = max(0, self._num_runs - self.number)
        left_s = rest_s + coming * sum(all_s) / len(all_s)
        return left_s if left_s > 0 else None
