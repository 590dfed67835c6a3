"""`LiveStatus`: how a run stands, in the file `live.json` that its launcher replaces about once a second.

launcher ── live.json: processes, hosts, rates, staleness, faults ──▶ `polytempo top`, or any program that reads JSON
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.report.pages.noise import last_noise
from polytempo.report.status.records import (
    GroupStatus,
    ProcessEvent,
    RunFinished,
    RunStarted,
    RunState,
    StreamRecord,
)
from polytempo.report.status.rows import check_row

VERSION = 1
MOST_EVENTS = 200
"""The file holds the last so many."""
_MOST_BYTES = 16 << 20
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]

ProcessState = Literal["running", "stopped", "ended", "killed", "failed", "unknown"]


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process of a run, or the last one in its place."""

    who: str
    """The name in logs and events: `worker-0`, `shard-1-node-3`."""
    kind: str
    host: str
    """The name of its host; "" where that is not known."""
    state: ProcessState = "unknown"
    """`stopped`: by a signal, or its host is silent; `killed`: it ended by a signal, or with its host."""
    samples_per_s: _Number | None = None
    """A worker's own, over its last row of metrics; None: it has told none."""
    idle_share: _Number | None = None
    """A worker's part of its time that it waited for the server, 0 to 1."""
    staleness: _Number | None = None
    """τ, the mean over a worker's pushes, or a stage's updates, in its last row: updates between reading weights and
    applying a gradient."""
    memory_bytes: _Seconds | None = None
    """Resident memory, shared pages included; None on other hosts, and after its end."""


class LiveStatus(msgspec.Struct, frozen=True):
    """A run at one moment. Times ending in `_s` are seconds; `began_s` and `written_s` since 1970."""

    version: int
    job: str
    strategy: str
    world: str
    workers: int
    state: RunState
    written_s: _Seconds
    began_s: _Seconds
    launcher_host: str
    launcher_pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    why: str = ""
    """Of a run that failed or was preempted: the first line of its error."""
    steps: int | None = None
    """Number of steps until its end; None: epochs decide. Counted, as in rows, as if all workers took them together."""
    epochs: _Number | None = None
    train: dict[str, Any] | None = None
    """The last row of metrics about training: step, epoch, samples, seconds, loss, samples_per_s."""
    test: dict[str, Any] | None = None
    """The last row about the test set: loss, accuracy."""
    processes: tuple[ProcessStatus, ...] = ()
    num_events: int = 0
    events: tuple[ProcessEvent, ...] = ()
    """The last ones."""
    group: GroupStatus | None = None
    """The present group of an elastic run."""
    groups: tuple[GroupStatus, ...] = ()
    """The run's last groups, with the present one."""
    origin: str | None = None
    """The name of the job for `pt.jobs.find`."""

    @property
    def staleness(self) -> float | None:
        """The mean over workers, or stages, that have told one."""
        told = [each.staleness for each in self.processes if each.staleness is not None]
        return sum(told) / len(told) if told else None

    @property
    def samples_per_s(self) -> float | None:
        """Rate of all workers: the sum of their rates, or else the rate of the last row."""
        told = [each.samples_per_s for each in self.processes if each.samples_per_s is not None]
        return sum(told) if told else (self.train or {}).get("samples_per_s")

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that processes are on."""
        return sorted({each.host for each in self.processes if each.host})


def write_status(folder: Place, status: LiveStatus) -> None:
    """Replace the file in `folder`, whole or not at all."""
    try:
        content = msgspec.json.encode(status)
    except UnicodeEncodeError:  # half of a surrogate pair, from a file's name in an error
        content = json.dumps(msgspec.to_builtins(status), ensure_ascii=False).encode(errors="replace")
    files.replace(folder / files.STATUS, content)


def read_status(folder: Place) -> LiveStatus | None:
    """The last status of `write_status`; None without one. ValueError for another file."""
    path = folder / files.STATUS
    if not path.exists():
        return None
    try:
        status = msgspec.json.decode(files.read(path, _MOST_BYTES), type=LiveStatus)
        for row in (status.train, status.test):
            check_row({} if row is None else row)
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(
            f"{path} is not a status of a run ({error}); remove it to see other files of the run"
        ) from error
    if status.version != VERSION:
        raise ValueError(
            f"{path} is of version {status.version}, and this polytempo reads version {VERSION}; look at the run with "
            "the polytempo that made it"
        )
    return status


def launcher_lives(status: LiveStatus) -> bool | None:
    """True if the launcher's process is there; None if it is on another host, or the run is over."""
    return process_lives(status.launcher_host, status.launcher_pid) if status.state == "running" else None


def process_lives(host: str, pid: int) -> bool | None:
    """True if the process is there; None if it is on another host."""
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class StatusNews:
    """The records that follow from a run's status: its start, new faults and groups, its end. Each is given once."""

    def __init__(self) -> None:
        self._started, self._events, self._generation = False, 0, 0

    def start(
        self,
        status: LiveStatus,
        *,
        resumed: bool | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> list[StreamRecord]:
        """The start, once."""
        if self._started:
            return []
        self._started = True
        return [
            RunStarted(
                job=status.job,
                strategy=status.strategy,
                world=status.world,
                workers=status.workers,
                began_s=status.began_s or None,
                steps=status.steps,
                epochs=status.epochs,
                host=status.launcher_host or None,
                pid=status.launcher_pid or None,
                resumed=resumed,
                origin=status.origin,
                settings=dict(settings),
                environment=dict(environment),
            )
        ]

    def look(self, status: LiveStatus) -> list[StreamRecord]:
        """The new faults, groups and the end."""
        ended = status.state != "running" or launcher_lives(status) is False
        first = status.num_events - len(status.events)
        begin = max(self._events, first)
        # The consequence of an event may be known later.
        events = list(takewhile(lambda event: event.then or ended, status.events[begin - first :]))
        self._events = begin + len(events)
        known = status.groups or (() if status.group is None else (status.group,))  # earlier versions wrote one
        groups = [each for each in known if each.generation > self._generation]
        if groups:
            self._generation = groups[-1].generation
        found: list[StreamRecord] = [*events, *groups]
        return found if status.state == "running" else [*found, RunFinished(state=status.state, why=status.why)]


def status_of_result(result: dict[str, Any], rows: list[dict[str, Any]]) -> LiveStatus:
    """The status of a finished run that left none, such as a simulation: from its result and its metrics."""
    server = result.get("server") or {}
    told = {worker["worker"]: worker for worker in server.get("workers", [])}
    mean = server.get("staleness", {}).get("mean")
    delays = [stage["delay"] for stage in result.get("stages") or ()]
    processes = tuple(
        ProcessStatus(
            f"worker-{number}" if server else f"rank-{number}",
            "worker" if server else "rank",
            "",
            "ended",
            told.get(number, {}).get("samples_per_s"),
            told.get(number, {}).get("idle_share"),
            delays[number % len(delays)] if delays else mean,
        )
        for number in range(int(result["workers"]))
    )
    events = events_of(server.get("events", []))
    last = {kind: next((row for row in reversed(rows) if row.get("kind") == kind), None) for kind in ("train", "test")}
    return LiveStatus(
        version=VERSION,
        job=str(result.get("job", "")),
        strategy=str(result["strategy"]),
        world=str(result["world"]),
        workers=int(result["workers"]),
        state="failed" if result.get("diverged") else "preempted" if result.get("left") else "finished",
        written_s=0.0,
        began_s=0.0,
        launcher_host="",
        launcher_pid=0,
        why=str(result.get("diverged") or result.get("left") or ""),
        train={key: result.get(f"{key}s" if key in ("step", "epoch") else key) for key in _POSITION}
        | _loss(result)
        | _noise(rows),
        test=last["test"],
        processes=processes,
        num_events=len(events),
        events=events[-MOST_EVENTS:],
    )


def events_of(told: Sequence[Mapping[str, Any]]) -> tuple[ProcessEvent, ...]:
    """Events of a run's processes, as they stand in a result's `server`."""
    return tuple(ProcessEvent(each["who"], each["how"], each["at_s"], each["then"]) for each in told)


_POSITION = ("step", "epoch", "samples", "seconds", "samples_per_s")


def _loss(result: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "train", "loss": result.get("train_loss")}


def _noise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    scale = last_noise(rows)
    return {} if scale is None else {"noise_scale": scale}
