"""`ProcessSupervisor`: the processes of a run with a parameter server, some of which may die while the run goes on.

node      a number in the run: a worker keeps its node over its lives, a copy of a shard is a new node each time
life      a number of a process: it has memory and a log of its own
"""

from __future__ import annotations

import time
from typing import Any

from polytempo.engines.engine import Engine, EngineProcess, Role
from polytempo.spec.topology import Topology


class ProcessSupervisor:
    """Keeps account of who runs on which node, over an engine that starts and ends processes."""

    def __init__(self, engine: Engine, topology: Topology) -> None:
        self._engine, self._topology = engine, topology
        self._running: dict[int, EngineProcess] = {}
        self.ended: list[EngineProcess] = []
        """Those that have ended, in that order."""
        self._lives = 0

    def start(self, kind: str, node: int, **more: Any) -> Role:
        """Start a process on `node`. `more` are fields of `Role`."""
        role = Role(kind, node, self._lives, **more)
        self._lives += 1
        self._running[node] = self._engine.start(role, self._topology.host_of(node))
        return role

    def look(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """Those that have ended since the last look; waits for one at most for `wait_s`."""
        gone = self._engine.poll(wait_s)
        for process in gone:
            if self._running.get(process.role.node) is process:
                del self._running[process.role.node]
        self.ended += gone
        return gone

    def kill(self, node: int) -> None:
        """End the process on `node` for certain; `look` will find it."""
        if node in self._running:
            self._engine.stop(self._running[node])

    def process_on(self, node: int) -> EngineProcess | None:
        """The process that runs on `node`."""
        return self._running.get(node)

    @property
    def running(self) -> list[Role]:
        """Who runs."""
        return [process.role for process in self._running.values()]

    @property
    def stopped(self) -> list[Role]:
        """Who is stopped by a signal, as of the last look. All others run, however long they compute."""
        return [process.role for process in self._running.values() if process.stopped]

    def wait(self, wait_s: float) -> None:
        """Wait until all have ended, at most for `wait_s`."""
        until = time.monotonic() + wait_s
        while self._running and time.monotonic() < until:
            self.look(until - time.monotonic())
