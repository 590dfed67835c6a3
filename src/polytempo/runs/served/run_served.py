"""`run` for strategies with a parameter server: workers, copies of shards, and the coordinator in this process.

launcher   coordinator ── looks after ──▶ workers, copies of shards     each a process with a mailbox and an arena
           a process has ended ─▶ coordinator.lose(node) ─▶ another process is started in its place
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from polytempo.core import PolytempoError
from polytempo.core.system.notice import Notice
from polytempo.engines.engine import Engine, EngineProcess, EngineSetup, Launch, Role
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.failures import WorkerDied, blame, death_of, died, how
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.live_run import RunEvents
from polytempo.runs.frame.run_frame import framed_job, torch_threads, with_page
from polytempo.runs.served.process_account import Departure, ProcessSupervisor
from polytempo.runs.served.reshaping import Reshapes
from polytempo.runs.served.run_snapshot import SnapshotSaves
from polytempo.runs.served.served_run import ServedOutcome, ServedRun
from polytempo.server.coordinator.chains import ShardLost
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.message import Message, Outbox
from polytempo.spec.result import Result
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.served.server_plan import ServerPlan

_LOOK_S = 0.05
"""The interval of the launcher's looks for ended processes."""
_GRACE_S = 3.0
"""The time that processes have to end after the run."""
_LONGEST_WRITE_S = 300.0
"""The time that shards have to write the last snapshot."""


def run_served(spec: RunSpec, setup: EngineSetup | None = None, progress: Progress | None = None) -> Result:
    """Train with worker processes and the parameter server that the run's strategy asks for.

    A worker that a signal kills is started again, and the others do its batches meanwhile; so is a copy of a shard, if
    another copy lives. At most `options.restarts` times in all. An exception in a worker ends the run. After SIGTERM a
    worker pushes its gradients and leaves; this process has a snapshot written and ends with `Preempted`.

    Errors: `NotFinite` as in `run`. `WorkerDied` names the process and quotes its log; `ShardLost` if the last copy of
    a shard has died.
    """
    events = RunEvents() if progress is None else RunEvents(progress.note)
    with torch_threads(), framed_job(spec, progress, events) as frame, ExitStack() as stack:
        run = ServedRun(spec, frame, events)
        stack.callback(run.close)
        launch = Launch(run.work, run.spec, run.setting, spec.workers, run.plan.most_lives, spec.options.threads)
        engine = frame.opened(setup or Local(), launch)
        run.meet(engine.address)
        frame.keep_rows(run.resumed_at, run.scored_again)
        stack.enter_context(run.kept(engine.address.threads))
        if run.host is not None:
            stack.enter_context(run.host.running(lambda row: None, run.resumed_at or 0))
            events.hear(run.host.faulted)
        outcome = _conducted(run, engine, frame.heed(spec.options.grace_s) or Notice(spec.options.grace_s))
    result = run.result(outcome)
    if run.out is not None:
        run.leave_trace(outcome, run.out)
    return with_page(result, spec)


def _conducted(run: ServedRun, engine: Engine, notice: Notice) -> ServedOutcome:
    """Start all processes, be the coordinator until the end, and leave no process."""
    supervisor = ProcessSupervisor(engine, run.plan.topology)
    for worker in run.plan.topology.workers:
        supervisor.start("worker", worker, incarnation=run.incarnation)
    for shard, chain in enumerate(run.plan.topology.chains):
        for node in chain:
            supervisor.start("copy", node, shard=shard)  # each has the state that the run begins with
    if run.evaluator is not None:
        supervisor.start("evaluator", run.evaluator)
    launcher = Launcher(run, supervisor)
    launcher.departure = Departure(run, supervisor, notice)
    run.conduct(launcher)
    run.events.restarts = launcher.restarts
    launcher.await_saved()
    launcher.dismiss()
    supervisor.wait(_GRACE_S)
    engine.stop()
    supervisor.look()
    return run.outcome(supervisor.ended)


class Conducted(Protocol):
    """The launcher's view of a run, such as a `ServedRun`."""

    coordinator: Coordinator
    options: RunOptions
    events: RunEvents
    incarnation: int
    on_event: Callable[[tuple[str, int]], None]
    saves: SnapshotSaves | None

    @property
    def plan(self) -> ServerPlan:
        """The run's nodes and limits."""

    @property
    def out(self) -> object:
        """The run's folder, for messages."""

    def look(self, now_s: float, out: Outbox) -> None:
        """Look for changes; the launcher calls it now and then, between messages."""


class Launcher:
    """The coordinator's machine with the processes: it sees processes end, and starts others."""

    def __init__(self, run: Conducted, supervisor: ProcessSupervisor) -> None:
        self.departure: Departure | None = None
        """Handles SIGTERM. None: no process leaves."""
        self._run, self._supervisor, self._coordinator = run, supervisor, run.coordinator
        self._incarnations = dict.fromkeys(run.plan.topology.workers, run.incarnation)
        self._next_node = run.plan.topology.evaluator + 1
        self._restarts = 0
        self._now_s = 0.0
        self._heard_s: dict[int, float] = {}
        """Node -> time of its last message, or of its start."""
        self._silent: dict[int, float] = {}
        """Nodes that were given up -> seconds of their silence."""
        self._shrunk = ""
        self._after: dict[int, str] = {}
        """Copies that left their chain -> the consequence for their shard."""
        self._short: set[int] = set()
        """Shards that cannot get another copy."""
        self._look_at_s = 0.0
        self._ending: dict[int, set[int]] = {}
        """First worker of a replica that has lost a stage -> its processes that have not ended yet."""
        self._reshapes = Reshapes(self._coordinator, run.options.reshape, run.plan.topology.spares, self._shard)
        run.on_event = self._hear

    @property
    def restarts(self) -> int:
        """The number of processes that were started in the place of others."""
        return self._restarts

    @property
    def finished(self) -> bool:
        """True if the coordinator has finished."""
        return self._coordinator.finished

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The coordinator's answer."""
        self._now_s = self._heard_s[source] = now_s
        out = self._coordinator.receive(now_s, source, message)
        if self._coordinator.scheduler.finished:  # the shards hear of the last snapshot before they hear of the end
            self._run.look(now_s, out)
        return out

    def tick(self, now_s: float) -> Outbox:
        """Look at the processes, and let the coordinator tick."""
        out: Outbox = []
        self._now_s = now_s
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            out += self._look(now_s)
        return out + self._coordinator.tick(now_s)

    def wait_s(self, now_s: float) -> float:
        """The coordinator's wait, at most until the next look."""
        return max(0.0, min(self._coordinator.wait_s(now_s), self._look_at_s - now_s))

    def await_saved(self) -> None:
        """Wait, after the end, until the shards have written the last snapshot or cannot write it any more."""
        saves, until_s = self._run.saves, time.monotonic() + _LONGEST_WRITE_S
        while saves is not None and saves.pending and time.monotonic() < until_s:
            if not any(role.kind == "copy" for role in self._supervisor.running):
                for process in self._supervisor.ended:
                    if process.role.kind == "copy" and process.failure is not None and not process.failure.symptom:
                        raise self._died(process)  # it could not write its part
                print(f"the last snapshot was not written; look into the logs of {self._run.out}", file=sys.stderr)
                break
            self._supervisor.wait(_LOOK_S)

    def flops(self, message: Message) -> float:
        """The coordinator's work is free."""
        return 0.0

    def dismiss(self) -> None:
        """End processes that do not know of the end: copies that have not joined their chain, and late workers."""
        roles = {
            role.node: role
            for role in [*(process.role for process in self._supervisor.ended), *self._supervisor.running]
        }
        for node in self._silent:  # given up after the last look
            self._tell(roles[node], "", again=False)
        chained = {node for chain in self._coordinator.chains for node in chain}
        for role in self._supervisor.running:
            if role.kind == "evaluator":
                continue  # it gets the end from the coordinator, as the shards do
            node = role.node if role.kind == "copy" else self._run.plan.topology.replica_of(role.node)[0]
            if node not in (chained if role.kind == "copy" else self._coordinator.released):
                self._supervisor.kill(role.node)

    def _look(self, now_s: float) -> Outbox:
        out: Outbox = []
        if self.finished:
            return out  # the end of processes is expected now
        for process in self._supervisor.look():
            role = process.role
            ending = role.kind == "worker" and self._run.plan.topology.replica_of(role.node)[0] in self._ending
            if not ending and (process.failure is not None or (process.exit_code or 0) > 0):
                raise self._died(process)
            if role.kind == "evaluator":
                self._score_again(role, how(process))
                continue
            if role.kind == "worker" and self._run.plan.topology.stages > 1:
                out += self._stage_ended(process, now_s)
                continue
            try:
                out += self._coordinator.lose(now_s, role.node)
            except ShardLost as error:
                raise blame(error, death_of(process, str(role))) from None
            ended_well = process.exit_code == 0
            if ended_well and self.departure is not None and self.departure.left(process, now_s):
                self._again(role, "left after SIGTERM")
            again = role.kind == "worker" and not ended_well and not self._coordinator.scheduler.finished
            if again:
                self._again(role, how(process))
            if not ended_well:
                self._tell(role, how(process), again=again)
            self._silent.pop(role.node, None)
        self._see_alive(now_s)
        if self.departure is not None:
            out += self.departure.look(now_s)
        for shard in self._coordinator.wanted:
            self._copy(shard)
        self._run.look(now_s, out)
        return out + self._reshapes.look(now_s)

    def _stage_ended(self, process: EngineProcess, now_s: float) -> Outbox:
        """Take the end of a worker that holds a stage. All workers of its replica begin again, unless every batch is
        done."""
        role, replica = process.role, self._run.plan.topology.replica_of(process.role.node)
        first, ending = replica[0], self._ending.get(replica[0])
        if ending is None:
            if process.exit_code == 0:
                return []
            ending, again = set(replica), not self._coordinator.scheduler.finished
            self._ending[first] = ending
            self._tell(role, how(process), again=again, whose=", and its replica")
            if again:
                self._count(role, how(process))
            for node in replica:
                self._supervisor.kill(node)
        ending.discard(role.node)
        ending &= {other.node for other in self._supervisor.running}
        if ending:
            return []
        del self._ending[first]
        self._silent.pop(first, None)
        out = self._coordinator.lose(now_s, first)
        if not self._coordinator.scheduler.finished:
            self._coordinator.expect(first)
            for node in replica:
                self._begin_again(node)
        return out

    def _died(self, process: EngineProcess) -> WorkerDied:
        why, holding = self._waited_for(process), self._holding(process)
        return died([process], self._run.plan.most_lives, who=str(process.role), why=why, holding=holding)

    def _holding(self, process: EngineProcess) -> tuple[EngineProcess, str] | None:
        """The process that a process which failed of its wait waited for, and the cause."""
        if process.failure is None or not process.failure.symptom:
            return None
        holders = set(self._coordinator.scheduler.holders().values()) - {process.role.node}
        running = [each for each in self._supervisor.alive if each is not process]
        stopped = next((each for each in running if each.stopped), None)
        if stopped is not None:
            return stopped, "is stopped by a signal"
        holder = next((each for each in running if each.role.kind == "worker" and each.role.node in holders), None)
        return None if holder is None else (holder, "hangs with a batch in hand")

    def _see_alive(self, now_s: float) -> None:
        """Note running processes as alive, also silent ones; stopped processes count as silent."""
        stopped = {role.node for role in self._supervisor.stopped}
        for role in self._supervisor.running:
            if role.node not in stopped:
                self._heard_s[role.node] = now_s
                self._coordinator.failure_detector.note_alive(now_s, role.node)

    def _waited_for(self, process: EngineProcess) -> str:
        """The causes of a process's long wait in words: held batches and stopped processes."""
        if process.failure is None or not process.failure.symptom:
            return ""
        stopped = {other.node: str(other) for other in self._supervisor.stopped}
        holders = sorted(set(self._coordinator.scheduler.holders().values()) - {process.role.node} - set(stopped))
        facts = [f"{', '.join(stopped.values())} stopped by a signal"] * bool(stopped)
        facts += [f"{', '.join(f'worker-{worker}' for worker in holders)} had batches in hand"] * bool(holders)
        remedy = f"give a timeout_s of more than {self._run.options.timeout_s:g} where a step takes that long"
        return f" Meanwhile {'; '.join(facts)}: {remedy}." if facts else ""

    def _tell(self, role: Role, how_it_ended: str, *, again: bool, whose: str = "") -> None:
        """Add the end of a process to the events, with the reason if the launcher killed it. `whose`: other processes
        that were started again."""
        silent_s = self._silent.get(role.node)
        reason = how_it_ended if silent_s is None else f"was silent for {silent_s:.1f} s"
        if role.kind == "copy":
            then = self._after.pop(role.node, f"shard {role.shard}: it had not joined the others yet")
        else:
            then = f"started again{whose}" if again else "not started again: all batches were done"
        self._run.events.add(str(role), reason, self._now_s, then)

    def _shard(self, shard: int, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            self._supervisor.start("copy", node, shard=shard)

    def _again(self, role: Role, reason: str) -> None:
        self._count(role, f"{reason} after a long silence" if role.node in self._silent else reason)
        self._coordinator.expect(role.node)
        self._begin_again(role.node)

    def _begin_again(self, worker: int) -> None:
        self._incarnations[worker] += 1
        self._supervisor.start("worker", worker, incarnation=self._incarnations[worker])
        self._heard_s[worker] = self._now_s

    def _score_again(self, role: Role, reason: str) -> None:
        """Start the evaluator's next life; the shards still hold the snapshots that it has not scored."""
        self._run.events.add(str(role), reason, self._now_s, "started again")
        self._count(role, reason)
        self._supervisor.start("evaluator", role.node, incarnation=role.incarnation + 1)

    def _copy(self, shard: int) -> None:
        events = self._run.events
        if self._restarts >= self._run.options.restarts:
            if shard not in self._short:
                self._short.add(shard)
                events.add(f"shard-{shard}", "lacks a copy", self._now_s, "no restarts are left for another")
            return
        self._restarts += 1
        role = self._supervisor.start("copy", self._next_node, shard=shard, blank=True)
        self._heard_s[role.node] = self._now_s
        events.add(str(role), "was started", self._now_s, f"shard {shard}: it takes a lost copy's place")
        self._coordinator.recruit(shard, self._next_node)
        self._next_node += 1

    def _count(self, role: Role, reason: str) -> None:
        self._restarts += 1
        if self._restarts > self._run.options.restarts:
            raise PolytempoError(
                f"{role} {reason}, and {self._run.options.restarts} processes have been started again already; give "
                "more restarts if that is to be expected"
            )

    def _hear(self, event: tuple[str, int]) -> None:
        """Take an event of the coordinator. A process that it gives up may only have stood still, and is ended."""
        self._reshapes.hear(event)
        what, node = event
        if what == "silent":
            self._silent[node] = self._now_s - self._heard_s.get(node, 0.0)
            self._supervisor.kill(node)
        elif what == "promoted":
            self._shrunk = f"shard {node}: the next copy took over"
        elif what == "shortened":
            self._shrunk = f"shard {node}: its other copies went on"
        elif what == "deposed":
            self._after[node] = self._shrunk
