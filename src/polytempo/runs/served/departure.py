"""`Departure`: who leaves a run with a parameter server because of SIGTERM: a worker, or the run itself.

a worker     pushes what it has and ends; its batches are dealt again, and the run goes on without it
the run      (this process has been asked, or no worker is left) has a snapshot written, and ends with `Preempted`
"""

from __future__ import annotations

import json

from polytempo.core import PolytempoError
from polytempo.core.system.notice import Notice, Preempted
from polytempo.engines.engine import EngineProcess
from polytempo.runs.served.served_run import ServedRun
from polytempo.runs.served.supervisor import ProcessSupervisor
from polytempo.server.message import Outbox


class Departure:
    """The launcher looks here, after it has seen which processes have ended."""

    def __init__(self, run: ServedRun, supervisor: ProcessSupervisor, notice: Notice) -> None:
        self._run, self._supervisor, self._notice = run, supervisor, notice
        self._leaves = False

    def left(self, process: EngineProcess, now_s: float) -> bool:
        """A process has ended well: note a worker that has left. Returns whether another must take its place.

        It must where batches are dealt evenly: there all workers wait for each other.
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
        """Have the run saved where it has to leave. Raises `Preempted` when that is done."""
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
