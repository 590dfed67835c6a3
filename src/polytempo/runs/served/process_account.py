"""The processes of a run with a parameter server, which may die or leave while the run goes on.

node      a number in the run: a worker keeps its node over its lives, a copy of a shard is a new node each time
life      a number of a process: it has memory and a log of its own
"""

from __future__ import annotations

import json
import time
from typing import Any

from polytempo.core import PolytempoError
from polytempo.core.system.notice import Notice, Preempted
from polytempo.engines.engine import Engine, EngineProcess, Role
from polytempo.runs.served.served_run import ServedRun
from polytempo.server.message import Outbox
from polytempo.spec.topology import Topology


class ProcessSupervisor:
    """Keeps account of the process on each node, over an engine that starts and ends processes."""

    def __init__(self, engine: Engine, topology: Topology) -> None:
        self._engine, self._topology = engine, topology
        self._running: dict[int, EngineProcess] = {}
        self.ended: list[EngineProcess] = []
        """The ended processes, in the order of their ends."""
        self._lives = 0

    def start(self, kind: str, node: int, **more: Any) -> Role:
        """Start a process on `node`. `more` are fields of `Role`."""
        role = Role(kind, node, self._lives, **more)
        self._lives += 1
        self._running[node] = self._engine.start(role, self._topology.host_of(node))
        return role

    def look(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """The processes that have ended since the last look; waits for an end at most for `wait_s`."""
        gone = self._engine.poll(wait_s)
        for process in gone:
            if self._running.get(process.role.node) is process:
                del self._running[process.role.node]
        self.ended += gone
        return gone

    def kill(self, node: int) -> None:
        """End the process on `node`; `look` will find it."""
        if node in self._running:
            self._engine.stop(self._running[node])

    def process_on(self, node: int) -> EngineProcess | None:
        """The process that runs on `node`."""
        return self._running.get(node)

    @property
    def alive(self) -> list[EngineProcess]:
        """The running processes."""
        return list(self._running.values())

    @property
    def running(self) -> list[Role]:
        """The roles of running processes."""
        return [process.role for process in self._running.values()]

    @property
    def stopped(self) -> list[Role]:
        """The roles of processes that a signal had stopped at the last look."""
        return [process.role for process in self._running.values() if process.stopped]

    def wait(self, wait_s: float) -> None:
        """Wait until all have ended, at most for `wait_s`."""
        until = time.monotonic() + wait_s
        while self._running and time.monotonic() < until:
            self.look(until - time.monotonic())


class Departure:
    """A worker, or the whole run, leaves because of SIGTERM. The launcher calls it after each look for processes.

    a worker     pushes its gradients and ends; its batches are dealt again, and the run goes on without it
    the run      (this process got SIGTERM, or no worker is left) has a snapshot written, and ends with `Preempted`
    """

    def __init__(self, run: ServedRun, supervisor: ProcessSupervisor, notice: Notice) -> None:
        self._run, self._supervisor, self._notice = run, supervisor, notice
        self._leaves = False

    def left(self, process: EngineProcess, now_s: float) -> bool:
        """Take the good end of a process, perhaps of a worker that leaves. Returns True if another must replace it.

        This is so if batches are dealt evenly, because then all workers wait for each other.
        """
        role, scheduler = process.role, self._run.coordinator.scheduler
        if role.kind != "worker" or scheduler.finished or not json.loads(process.result or b"{}").get("left"):
            return False
        if self._notice.given:
            return False
        if scheduler.deals == "evenly":
            return True
        self._run.events.add(str(role), "left after SIGTERM", now_s, "its batches were dealt again")
        workers = sum(other.kind == "worker" for other in self._supervisor.running)
        server = self._run.spec.strategy.server
        self._leaves = workers < max(1, 0 if server is None else server.least_workers)
        return False

    def look(self, now_s: float) -> Outbox:
        """Save the run if it has to leave. Raises `Preempted` when it is saved."""
        if not self._leaves and not self._notice.given:
            return []
        self._leaves, saves = True, self._run.saves
        nothing = not list(self._run.coordinator.scheduler.done)
        if self._notice.expired or (self._notice.given and (saves is None or nothing)):
            self._notice.end()
        if saves is None:
            raise PolytempoError(
                "too few workers are left, for others got SIGTERM; give out=…, so that the run is saved"
            )
        if saves.left:
            raise Preempted(self._run.tally.last_step)
        return saves.leave(now_s)
