"""`LiveRun`: the launcher's knowledge of its run, written to `live.json` and `events.jsonl` about once a second."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from polytempo.core.system.notice import PREEMPTED, Preempted
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.engine import AskingWhere, Engine, EngineProcess, Preempting, Role
from polytempo.report.pages.noise import noise_of
from polytempo.report.status.event_log import EventLog, finish_of
from polytempo.report.status.live_status import (
    MOST_EVENTS,
    VERSION,
    LiveStatus,
    ProcessState,
    ProcessStatus,
    StatusNews,
    events_of,
    write_status,
)
from polytempo.report.status.records import GroupStatus, ProcessEvent, RunState, StreamRecord, diagnosis_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.run_settings import environment_of, settings_of

WRITE_INTERVAL_S, URL_INTERVAL_S = 1.0, 15.0
"""The interval on this host's disk, and the interval for a URL: each file of it may be a request over the network."""
MOST_SAMPLED = 256
"""Processes with a known memory: the first ones."""
_MOST_EVENTS = 200

Row = Mapping[str, Any]


class RunHistory(Protocol):
    """The fate of a run's processes so far."""

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The faults, with the keys who, how, at_s, then."""

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups of an elastic run so far, with the keys generation, step, members."""


class RunEvents:
    """Processes that died or fell silent, and the consequences. `say` receives each as a line of text."""

    def __init__(self, say: Callable[[str], object] = lambda line: None) -> None:
        self._say = say
        self.restarts = 0
        """The number of processes that were started in the place of others."""
        self.events: list[dict[str, Any]] = []
        """The first events, with the keys who, how, at_s (seconds since the run's begin), then."""

    def hear(self, faulted: Callable[[str], None]) -> None:
        """Give each event to `faulted`, too, as a line of text."""
        say = self._say

        def both(line: str) -> None:
            say(line)
            faulted(line)

        self._say = both

    def add(self, who: str, how: str, at_s: float, then: str) -> None:
        """Add an event: `who` "was killed by SIGKILL" (`how`) at `at_s`; `then` is the consequence."""
        if len(self.events) < _MOST_EVENTS:
            self.events.append({"who": who, "how": how, "at_s": round(at_s, 3), "then": then})
        self._say(f"{at_s:.1f} s: {who} {how}; {then}")

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Empty: the processes of the run are not an elastic group."""
        return ()

    @property
    def facts(self) -> dict[str, Any]:
        """The events' part of a result's `server`."""
        return {"events": self.events, "restarts": self.restarts}


class ShownRun(NamedTuple):
    """The facts of a run in its live status and its progress."""

    job: str
    strategy: str
    workers: int
    steps: int | None = None
    epochs: float | None = None
    stages: int = 1
    resume: bool = False
    origin: str | None = None
    """The name of the job for `pt.jobs.find`."""
    settings: Mapping[str, str] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, spec: RunSpec) -> ShownRun:
        """The facts of a job's run."""
        strategy = spec.strategy
        options = spec.options
        return cls(
            spec.job.name,
            str(strategy),
            spec.workers,
            options.steps,
            spec.epochs,
            strategy.stages,
            options.resume,
            spec.job.origin,
            settings_of(spec),
            environment_of(options, strategy),
        )


class LiveRun:
    """The status of a run with the folder `out` (None: nothing is written).

        with LiveRun(out, ShownRun.of(spec), history) as live:
            engine = live.watching(engine)       # sees processes start and end
            record = live.noting(record)         # sees rows of metrics

    The files are written when the run begins, when it ends, and during `poll`: at most once a second; `live.json` every
    15 s if `out` is a URL. A run goes on without a file that cannot be written. Cost: 200 bytes for each process and
    second.
    """

    def __init__(
        self, out: Place | None, shown: ShownRun, history: RunHistory, clock: Callable[[], float] = time.time
    ) -> None:
        self._out, self._shown, self._history, self._clock = out, shown, history, clock
        self._began_s = clock()
        self._next_s = self._next_news_s = 0.0
        self._events: EventLog | None = None
        self._news = StatusNews()
        self._here = socket.gethostname()
        self._processes: dict[int, EngineProcess] = {}
        """The last process of each node."""
        self._rows: dict[int, Row] = {}
        """The last row of each worker."""
        self._delays: dict[int, float | None] = {}
        """The delay of updates of each stage of a pipeline, from the last row with a delay."""
        self._memory: dict[int, int | None] = {}
        """The memory of each node at the last write."""
        self._last: dict[str, Row] = {}
        """The last row of each kind."""

    def watching(self, engine: Engine) -> Engine:
        """`engine`, with this object as an observer of its processes."""
        return engine if self._out is None else _WatchedEngine(engine, self)

    def noting(self, show: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """`show`, with this object as an observer of its rows."""

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
        """Take the start of a process. New members of an elastic run replace members that have ended."""
        if process.role.kind == "member":
            gone = [node for node, each in self._processes.items() if each.exit_code is not None]
            for node in gone:
                del self._processes[node]
        self._processes[process.role.node] = process

    def look(self) -> None:
        """Write, if the interval is over."""
        now_s = self._clock()
        if _is_over(now_s, self._next_news_s):
            self._tell(self.status("running"))
        if _is_over(now_s, self._next_s):
            sampled = islice(self._processes.items(), MOST_SAMPLED)
            self._memory = {node: process.memory_bytes for node, process in sampled}
            self._write(self.status("running"))

    def append(self, record: StreamRecord) -> None:
        """Append a record to the run's stream."""
        if self._events is not None:
            self._events.append(record)

    def status(self, state: RunState, why: str = "") -> LiveStatus:
        """The run as it is now."""
        shown, events = self._shown, self._history.events
        groups = [GroupStatus(e["generation"], e["step"], len(e["members"])) for e in self._history.groups]
        return LiveStatus(
            version=VERSION,
            job=shown.job,
            strategy=shown.strategy,
            world="process",
            workers=shown.workers,
            state=state,
            written_s=self._clock(),
            began_s=self._began_s,
            launcher_host=self._here,
            launcher_pid=os.getpid(),
            why=why,
            steps=shown.steps,
            epochs=shown.epochs,
            train=self._train(),
            test=_plain(self._last.get("test")),
            processes=tuple(self._status_of(process) for _, process in sorted(self._processes.items())),
            num_events=len(events),
            events=events_of(events[-MOST_EVENTS:]),
            group=groups[-1] if groups else None,
            groups=tuple(groups[-MOST_EVENTS:]),
            origin=shown.origin,
        )

    def _train(self) -> dict[str, Any] | None:
        """The last row about training, with the noise scale of all workers that have one."""
        row = _plain(self._last.get("train"))
        if row is not None and "noise_scale" in row and self._rows:
            row["noise_scale"] = noise_of(self._rows.values())
        return row

    def _status_of(self, process: EngineProcess) -> ProcessStatus:
        role = process.role
        row = self._rows.get(role.node, {}) if role.kind == "worker" else {}
        if role.kind == "rank":
            row = {"staleness": self._delays.get(role.node % self._shown.stages)}
        return ProcessStatus(
            who=str(role),
            kind=role.kind,
            host=process.host or self._here,
            state=_state_of(process),
            samples_per_s=row.get("samples_per_s"),
            idle_share=row.get("idle_share"),
            staleness=row.get("staleness"),
            memory_bytes=None if process.exit_code is not None else self._memory.get(role.node),
        )

    def _tell(self, status: LiveStatus) -> None:
        """Append the news to the stream."""
        self._next_news_s = status.written_s + WRITE_INTERVAL_S
        step = (self._last.get("train") or {}).get("step")
        for record in self._news.look(status):
            placed = isinstance(record, ProcessEvent) and step is not None
            self.append(msgspec.structs.replace(record, step=step) if placed else record)

    def _write(self, status: LiveStatus) -> None:
        self._next_s = status.written_s + (URL_INTERVAL_S if isinstance(self._out, UrlPath) else WRITE_INTERVAL_S)
        if self._out is not None:
            with suppress(OSError):
                write_status(self._out, status)

    def __enter__(self) -> LiveRun:
        status, resume = self.status("running"), self._shown.resume
        if self._out is not None:
            self._events = EventLog(self._out, fresh=not resume)
            resumed = resume and (self._out / "checkpoint").exists()
            settings, environment = self._shown.settings, self._shown.environment
            for record in self._news.start(status, resumed=resumed or None, settings=settings, environment=environment):
                self.append(record)
        self._write(status)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        finish = finish_of(error)
        if (death := getattr(error, "death", None)) is not None:
            step = self._last.get("train", {}).get("step")
            self.append(diagnosis_of(death, self._clock() - self._began_s, step))
        status = self.status(finish.state, finish.why)
        self._tell(status)
        self._write(status)


class _WatchedEngine:
    """An `Engine` with a `LiveRun` as an observer; it passes SIGTERM on if the engine does."""

    def __init__(self, engine: Engine, live: LiveRun) -> None:
        self._engine, self._live = engine, live
        self.address, self.stop = engine.address, engine.stop
        if isinstance(engine, Preempting):
            self.preempt = engine.preempt
        if isinstance(engine, AskingWhere):
            self.ask_where = engine.ask_where

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


def _state_of(process: EngineProcess) -> ProcessState:
    code = process.exit_code
    if code is None:
        return "stopped" if process.stopped else "running"
    left = code == PREEMPTED and process.failure is not None and process.failure.error == Preempted.__name__
    return "killed" if code < 0 else "failed" if code and not left else "ended"


def _is_over(now_s: float, next_s: float) -> bool:
    """True at `next_s`, and where the clock was set back since the last time."""
    return not now_s < next_s <= now_s + URL_INTERVAL_S


def _plain(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else dict(row)
