"""`LiveRun`: what a launcher knows of its run while it goes on, written to `live.json` about once a second."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from polytempo.core.system.notice import PREEMPTED, Preempted
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.engine import Engine, EngineAddress, EngineProcess, Preempting, Role
from polytempo.report.pages.noise import noise_of
from polytempo.report.status.live_status import (
    MOST_EVENTS,
    VERSION,
    GroupStatus,
    LiveStatus,
    ProcessState,
    ProcessStatus,
    RunState,
    events_of,
    write_status,
)
from polytempo.spec.run_spec import RunSpec

WRITE_INTERVAL_S, URL_INTERVAL_S = 1.0, 15.0
"""On this host's disk, and where a URL names the folder, whose every file may take a request over the network."""
_MOST_WHY = 300

Row = Mapping[str, Any]


class RunHistory(Protocol):
    """The fate of a run's processes so far."""

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The faults: who, how, at_s, then."""

    @property
    def group(self) -> Mapping[str, Any] | None:
        """The present group of an elastic run: generation, step, members."""


class LiveRun:
    """Around a run with the folder `out` (None: nothing is written).

        with LiveRun(out, spec, history) as live:
            engine = live.watching(engine)       # sees processes start and end
            record = live.noting(record)         # sees rows of metrics

    The file is written when the run begins, when it ends, however it does, and while `poll` is called: at most once a
    second, or every 15 s where a URL names the folder. A file that cannot be written ends no run. Cost: some 200 bytes
    for each process and second.
    """

    def __init__(
        self, out: Place | None, spec: RunSpec, history: RunHistory, clock: Callable[[], float] = time.time
    ) -> None:
        self._out, self._spec, self._history, self._clock = out, spec, history, clock
        self._began_s = clock()
        self._next_s = 0.0
        self._here = socket.gethostname()
        self._processes: dict[int, EngineProcess] = {}
        """The last process of each node."""
        self._rows: dict[int, Row] = {}
        """The last row of each worker."""
        self._delays: dict[int, float | None] = {}
        """How late the updates of each stage of a pipeline were, as the last row that said it has it."""
        self._last: dict[str, Row] = {}
        """The last row of each kind."""

    def watching(self, engine: Engine) -> Engine:
        """`engine`, whose processes are seen from here."""
        if self._out is None:
            return engine
        return _WatchedPreempting(engine, self) if isinstance(engine, Preempting) else _WatchedEngine(engine, self)

    def noting(self, show: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """`show`, whose rows are seen from here."""

        def noted(row: dict[str, Any]) -> None:
            self._last[row["kind"]] = row
            if row["kind"] == "train" and "worker" in row:
                worker, told = int(row["worker"]), row.get("staleness")
                before = self._rows.get(worker, {}).get("staleness")  # a row without a push has none
                self._rows[worker] = row if told is not None else {**row, "staleness": before}
            for stage, delay in enumerate(row.get("delays") or ()):
                self._delays[stage] = delay if delay is not None else self._delays.get(stage)
            show(row)

        return noted

    def started(self, process: EngineProcess) -> None:
        """A process was started. Members of an elastic run that have ended make room for those that come."""
        if process.role.kind == "member":
            gone = [node for node, each in self._processes.items() if each.exit_code is not None]
            for node in gone:
                del self._processes[node]
        self._processes[process.role.node] = process

    def look(self) -> None:
        """Write, if it is time to."""
        if self._clock() >= self._next_s:
            self._write("running")

    def status(self, state: RunState, why: str = "") -> LiveStatus:
        """The run as it is now."""
        spec, events, group = self._spec, self._history.events, self._history.group
        return LiveStatus(
            version=VERSION,
            job=spec.job.name,
            strategy=str(spec.strategy),
            world="process",
            workers=spec.workers,
            state=state,
            written_s=self._clock(),
            began_s=self._began_s,
            launcher_host=self._here,
            launcher_pid=os.getpid(),
            why=why,
            steps=spec.options.steps,
            epochs=spec.epochs,
            train=self._train(),
            test=_plain(self._last.get("test")),
            processes=tuple(self._status_of(process) for _, process in sorted(self._processes.items())),
            num_events=len(events),
            events=events_of(events[-MOST_EVENTS:]),
            group=None if group is None else GroupStatus(group["generation"], group["step"], len(group["members"])),
        )

    def _train(self) -> dict[str, Any] | None:
        """The last row about training; its noise scale is that of all workers that have told theirs."""
        row = _plain(self._last.get("train"))
        if row is not None and "noise_scale" in row and self._rows:
            row["noise_scale"] = noise_of(self._rows.values())
        return row

    def _status_of(self, process: EngineProcess) -> ProcessStatus:
        role = process.role
        row = self._rows.get(role.node, {}) if role.kind == "worker" else {}
        if role.kind == "rank":
            row = {"staleness": self._delays.get(role.node % self._spec.strategy.stages)}
        return ProcessStatus(
            who=str(role),
            kind=role.kind,
            host=process.host or self._here,
            state=_state_of(process),
            samples_per_s=row.get("samples_per_s"),
            idle_share=row.get("idle_share"),
            staleness=row.get("staleness"),
        )

    def _write(self, state: RunState, why: str = "") -> None:
        self._next_s = self._clock() + (URL_INTERVAL_S if isinstance(self._out, UrlPath) else WRITE_INTERVAL_S)
        if self._out is not None:
            with suppress(OSError):
                write_status(self._out, self.status(state, why))

    def __enter__(self) -> LiveRun:
        self._write("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._write("finished")
        else:
            alone = isinstance(error, KeyboardInterrupt) and not isinstance(error, Preempted)
            said = "interrupted" if alone else str(error) or type(error).__name__
            said = said.partition("\n")[0]
            self._write("preempted" if isinstance(error, Preempted) else "failed", said[:_MOST_WHY])


class _WatchedEngine:
    """An engine, and a `LiveRun` that sees what it does. See `Engine`."""

    def __init__(self, engine: Engine, live: LiveRun) -> None:
        self._engine, self._live = engine, live

    @property
    def address(self) -> EngineAddress:
        """See `Engine`."""
        return self._engine.address

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """See `Engine`."""
        process = self._engine.start(role, host)
        self._live.started(process)
        return process

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """See `Engine`."""
        gone = self._engine.poll(wait_s)
        self._live.look()
        return gone

    def stop(self, process: EngineProcess | None = None) -> None:
        """See `Engine`."""
        self._engine.stop(process)


class _WatchedPreempting(_WatchedEngine):
    """The same of an engine that passes SIGTERM on."""

    def preempt(self) -> None:
        """See `Preempting`."""
        assert isinstance(self._engine, Preempting)
        self._engine.preempt()


def _state_of(process: EngineProcess) -> ProcessState:
    code = process.exit_code
    if code is None:
        return "stopped" if process.stopped else "running"
    left = code == PREEMPTED and process.failure is not None and process.failure.error == Preempted.__name__
    return "killed" if code < 0 else "failed" if code and not left else "ended"


def _plain(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else dict(row)
