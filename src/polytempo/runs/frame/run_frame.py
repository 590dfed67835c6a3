"""`RunFrame`: the launcher's frame around a run on processes, for every strategy.

folder ─ logs ─ live status ─ rows as progress ─ [ engine ─ files for other hosts ─ notice of SIGTERM ] ─ page
"""

from __future__ import annotations

import math
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polytempo.core.system import files
from polytempo.core.system.notice import Notice, noticed
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.engine import Engine, EngineSetup, Launch
from polytempo.engines.processes import janitor
from polytempo.engines.processes.failures import diverged
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.folder import began
from polytempo.runs.frame.launcher_files import served_files
from polytempo.runs.frame.live_run import LiveRun, RunEvents, RunHistory, ShownRun
from polytempo.runs.frame.run_page import reported, show_rows
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec

ShowRow = Callable[[dict[str, Any]], None]


class RunFrame:
    """The frame of a run; `framed` makes it."""

    def __init__(
        self,
        out: Place | None,
        live: LiveRun,
        logs: Path | None,
        show: Callable[[dict[str, Any]], None],
        stack: ExitStack,
    ) -> None:
        self.out = out
        """The folder's whole path."""
        self.show = show
        """Shows a row of metrics."""
        self.given: dict[str, Any] = {}
        """Further facts for processes that do not see the folder (see `launcher_files`)."""
        self.notice: Notice | None = None
        """Given when this process has to leave. None: SIGTERM ends this process."""
        self._live, self._logs, self._stack = live, logs, stack
        self._writer: MetricsWriter | None = None

    def placed(self, spec: RunSpec) -> RunSpec:
        """The run with the folder's whole path."""
        return replace(spec, options=replace(spec.options, out=self.out))

    def opened(self, setup: EngineSetup, launch: Launch) -> Engine:
        """The engine for the run's processes; it ends with the frame."""
        engine = self._stack.enter_context(setup.open(launch._replace(logs=self._logs)))
        self._stack.enter_context(served_files(self.out, engine.address, self.given))
        return self._live.watching(engine)

    def heed(self, grace_s: float) -> Notice | None:
        """Turn SIGTERM into a notice from now on, if the run can be saved."""
        if self.out is not None:
            self.notice = self._stack.enter_context(noticed(grace_s))
        return self.notice

    def keep_rows(self, resumed_at: int | None, scored_again: float = math.inf) -> None:
        """Write the rows of `record` into the folder, after the rows that a resumed run keeps."""
        if self.out is not None:
            writer = MetricsWriter(self.out, resumed_at=resumed_at, scored_again=scored_again)
            self._writer = self._stack.enter_context(writer)

    def record(self, row: dict[str, Any]) -> None:
        """Take a row of metrics."""
        if self._writer is not None:
            self._writer.write(row)
        self.show(row)


@contextmanager
def framed(
    shown: ShownRun, out: Place | None, rows: AbstractContextManager[ShowRow], history: RunHistory | None = None
) -> Iterator[RunFrame]:
    """A frame around a run. `rows` shows rows of metrics; `history` has the events of processes for the live status."""
    out = out and out.resolve()
    if out is not None:
        files.run_folder(out)
    with ExitStack() as stack:
        logs = stack.enter_context(_logs_of(out))
        live = stack.enter_context(LiveRun(out, shown, history or RunEvents()))
        stack.enter_context(diverged())
        yield RunFrame(out, live, logs, live.noting(stack.enter_context(rows)), stack)


def framed_job(
    spec: RunSpec, progress: Progress | None, history: RunHistory | None = None
) -> AbstractContextManager[RunFrame]:
    """A frame around a job's run, with its progress."""
    return framed(ShownRun.of(spec), spec.options.out, show_rows(progress, spec), history)


@contextmanager
def framed_program(shown: ShownRun, out: Path | None) -> Iterator[RunFrame]:
    """A frame around a run without a strategy; it holds the folder `out`, and begins its rows."""
    with began(out), framed(shown, out, nullcontext(lambda row: None)) as frame:
        frame.keep_rows(None)
        yield frame


@contextmanager
def _logs_of(out: Place | None) -> Iterator[Path | None]:
    """The local folder of processes' logs, in the run's folder, or copied there at the end if it is a URL."""
    if not isinstance(out, UrlPath):
        yield None if out is None else out / "logs"
        return
    home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"
    with janitor.swept(home):
        logs = home / "logs"
        try:
            yield logs
        finally:
            for log in sorted(logs.iterdir()) if logs.is_dir() else []:
                try:
                    (out / "logs" / log.name).upload(log)
                except OSError as error:  # without a log the run goes on
                    print(f"note: {log.name} is not in {out}: {error}", file=sys.stderr)


def with_page(result: Result, spec: RunSpec) -> Result:
    """The result of a run that is over. Its page is written into the run's folder, if there is one."""
    return result if spec.options.out is None else reported(result, spec.options.out)


@contextmanager
def torch_threads(number: int = 1) -> Iterator[None]:
    """Let this process compute with `number` threads. Of OpenMP's threads only one survives a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
