"""`ProcessSupervisor`: the processes of a run with a parameter server, some of which may die while the run goes on.

node      a number in the run: a worker keeps its node over its lives, a copy of a shard is a new node each time
life      a number of a process: it has an arena and a log of its own
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.engines.fork import held_signals
from polytempo.engines.worker import RankInfo
from polytempo.engines.worker_processes import WorkerProcess, end, look, start


class Role(NamedTuple):
    """What a process is to do."""

    kind: str
    """"worker", "copy" or "evaluator"."""
    node: int
    life: int
    incarnation: int = 1
    shard: int = -1
    blank: bool = False

    def __str__(self) -> str:
        if self.kind == "copy":
            return f"shard-{self.shard}-node-{self.node}"
        name = f"worker-{self.node}" if self.kind == "worker" else self.kind
        return name if self.incarnation == 1 else f"{name}.{self.incarnation}"


class ProcessSupervisor:
    """Starts processes that do `work(role)`, notices their ends, and ends them all in `close`."""

    def __init__(
        self,
        work: Callable[[Role], Mapping[str, Any] | None],
        home: Path,
        notes: int,
        logs: Path,
        *,
        threads: int,
        most_lives: int,
    ) -> None:
        self._work, self._home, self._notes, self._logs = work, home, notes, logs
        self._threads, self._most_lives = threads, most_lives
        self._running: dict[int, tuple[Role, WorkerProcess]] = {}
        self.ended: list[tuple[Role, WorkerProcess]] = []
        """Those that have ended, in that order."""
        self._lives = 0

    def start(self, kind: str, node: int, **more: Any) -> Role:
        """Start a process on `node`. `more` are fields of `Role`."""
        role = Role(kind, node, self._lives, **more)
        self._lives += 1
        rank_info = RankInfo(role.life, self._most_lives, self._home, self._threads)
        log = self._logs / f"{role}.log"
        with held_signals():  # a process that has been started is known here, too
            self._running[node] = role, start(lambda _: self._work(role), rank_info, log, self._notes)
        return role

    def look(self) -> list[tuple[Role, WorkerProcess]]:
        """Those that have ended since the last look, without waiting."""
        look([process for _, process in self._running.values()], 0.0)
        gone = [(role, process) for role, process in self._running.values() if process.exit_code is not None]
        for role, _ in gone:
            del self._running[role.node]
        self.ended += gone
        return gone

    def kill(self, node: int) -> None:
        """End the process on `node` for certain; `look` will find it."""
        if node in self._running:
            with suppress(ProcessLookupError):
                os.kill(self._running[node][1].process, signal.SIGKILL)

    def process_of(self, node: int) -> int | None:
        """The process id on `node`."""
        return self._running[node][1].process if node in self._running else None

    @property
    def running(self) -> list[Role]:
        """Who runs."""
        return [role for role, _ in self._running.values()]

    @property
    def stopped(self) -> list[Role]:
        """Who is stopped by a signal, as of the last look. All others run, however long they compute."""
        return [role for role, process in self._running.values() if process.stopped]

    def wait(self, wait_s: float) -> None:
        """Wait until all have ended, at most for `wait_s`."""
        until = time.monotonic() + wait_s
        while self._running and time.monotonic() < until:
            look([process for _, process in self._running.values()], until)
            self.look()

    def close(self) -> None:
        """End whoever still runs: a stopped process, too."""
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(process.process, signal.SIGCONT)
        end([process for _, process in self._running.values()])
        self.look()
