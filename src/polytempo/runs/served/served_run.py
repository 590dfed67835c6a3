"""`ServedRun`: one run with a parameter server on processes, in the process that conducts it.

out/checkpoint  the shards' snapshots      out/record   the entries of each shard, in their order
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.core import PolytempoError
from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.engine import EngineAddress, EngineProcess, Role
from polytempo.report.status.records import CheckpointSaved, row_of
from polytempo.runs.frame.live_run import RunEvents
from polytempo.runs.frame.run_frame import RunFrame
from polytempo.runs.process.host_mail import KeeperMail
from polytempo.runs.process.mailbox_directory import MailboxDirectory
from polytempo.runs.served.lost_launcher import LauncherPart, number_after
from polytempo.runs.served.recording import Recording, facts_now, has_ended, leave_end
from polytempo.runs.served.run_snapshot import RunSnapshot, SnapshotSaves, discard, go_on, resumed, run_snapshot_path
from polytempo.runs.served.served_node import Mailboxes, Setting, act
from polytempo.runs.served.served_program import ServedProgram
from polytempo.runs.served.tally import ServedTotals, Tally
from polytempo.server.coordinator.coordinator import Coordinator, Listeners
from polytempo.server.coordinator.saved_schedule import LIVES
from polytempo.server.loop import Machine, serve
from polytempo.server.message import Outbox
from polytempo.server.record import Entry
from polytempo.server.tensors.optimizer import can_be_native
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.randomness import in_turn
from polytempo.training.observe.callback_host import host_of
from polytempo.training.served.server_plan import ServerPlan
from polytempo.training.served.worker_program import Attendance
from polytempo.wire.keys import make_keys
from polytempo.wire.shared import Arenas
from polytempo.worlds import Joined, combined_hash, joined, write_chrome_trace
from polytempo.worlds.process.mail import MailWorld

_FAREWELL_S = 0.2
"""The time that the launcher's last messages have; some of them are for dead nodes."""
_EVERY_S = 10.0
"""The interval of writing the launcher's part of a snapshot, if a write is a request to another host."""


class ServedOutcome(NamedTuple):
    """The answers of the processes."""

    attendances: list[Attendance]
    sha256: str | None
    bytes_sent: dict[str, int]
    """Kind ("worker", "copy") -> bytes."""
    finals: dict[str, str]
    """The hash of each worker's final weights, by worker and life."""
    threads: int
    events: Joined
    trace_hash: str
    stages: list[dict[str, Any]]
    """The report of each stage of a replica, if the model is cut."""


class ServedRun:
    """The knowledge of the process that conducts the run: the machines that decide, and the facts for each process."""

    def __init__(self, spec: RunSpec, frame: RunFrame, events: RunEvents) -> None:
        self.spec, self.out, self.events = frame.placed(spec), frame.out, events
        self.options = self.spec.options
        with in_turn():
            self.program = ServedProgram(self.spec, forks=True)
        self.evaluator = self.plan.topology.evaluator if self.program.scores else None
        self.on_event: Callable[[tuple[str, int]], None] = lambda event: None
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self.scheduler = self.program.scheduler()
        self._resume()
        self.coordinator = self._coordinator()
        self.host = host_of(self.options)
        if self.host is not None and self.run_snapshot is not None and self.run_snapshot.callbacks:
            self.host.restore(self.run_snapshot.callbacks)
        self.tally = Tally(self.program, self.coordinator, frame.record, self.run_snapshot, self.host)
        self.recording: Recording | None = None
        self.saves: SnapshotSaves | None = None
        self._given, self._record = frame.given, frame.record
        self._arenas: Arenas | None = None
        self._keeper: KeeperMail | None = None
        self._lost: LauncherPart | None = None
        self._saves_if_lost = False
        self._zero_s = time.monotonic()  # of all processes' clocks: training begins as soon as they are started

    @property
    def plan(self) -> ServerPlan:
        """Nodes and limits."""
        return self.program.plan

    def meet(self, address: EngineAddress) -> None:
        """Choose the mailboxes: in a folder if processes have this one's memory, else by the address book.

        Call it before the first of them is started, and `close` at the end.
        """
        self._saves_if_lost = address.grace_s > 0
        self.program.place(address.num_hosts)
        plan = self.plan
        if address.inherits and address.home is not None:
            self._arenas = Arenas(plan.most_lives, plan.arena_bytes)
            directory = MailboxDirectory(address.home, self.options.transport, self._arenas, plan.mail_bytes)
            directory.open()
            self._mail: Mailboxes = directory
            return
        self._keys = make_keys()
        self._keeper = KeeperMail(plan.topology.coordinator, address.host, self._keys, plan.mail_bytes)
        self._mail = self._keeper

    def close(self) -> None:
        """Close shared memory, which is many files, and the address book: this object is part of cycles."""
        if self._arenas is not None:
            self._arenas.close()
        if self._keeper is not None:
            self._keeper.close()

    def _coordinator(self) -> Coordinator:
        listeners = Listeners(
            on_row=lambda row: self.tally.take(row),
            on_event=lambda event: self.on_event(event),
            on_entry=lambda entry: self.on_entry(entry),
        )
        return self.plan.coordinator(self.scheduler, listeners, self.evaluator, self.incarnation)

    def _resume(self) -> None:
        """Load the saved run, if this run goes on from one."""
        options, batches, service = self.options, self.program.batches, self.plan.service
        self.common: dict[str, Any] = {
            "job": self.spec.job.name,
            "strategy": str(self.spec.strategy),
            "shards": service.shards,
            "seed": self.spec.seed,
            "batch_size": batches.batch_size,
            "samples": batches.num_samples,
        }
        if batches.deals == "evenly":
            self.common["workers"] = batches.size
        self.run_snapshot, self.resumed_at, self.incarnation, self.scored_again = None, None, 1, math.inf
        if not options.resume or self.out is None:
            return
        folder, per_batch = self.out / "checkpoint", service.numbers_per_batch
        found = resumed(folder, service.shards, self.common, per_batch, even=batches.deals == "evenly")
        self.run_snapshot, self.resumed_at = found.run_snapshot, found.run_snapshot.step
        print(
            f"polytempo: goes on from step {self.resumed_at:,}, snapshot {found.run_snapshot.number} in {folder}",
            file=sys.stderr,
        )
        self.incarnation = (found.run_snapshot.generation + 1) * LIVES + 1
        go_on(self.scheduler, found, folder)
        self.scored_again = found.scored_again(self.program.points, batches)
        lacks_score = set(found.batches) == {self.scheduler.num_tickets} and not has_ended(
            self.out, found.run_snapshot.generation
        )
        if self.scheduler.finished and not lacks_score:
            raise ValueError(
                f"the run in {options.out} has done its {self.scheduler.num_tickets} batches already; resume it with "
                "more epochs or steps"
            )

    @contextmanager
    def kept(self, threads: int) -> Iterator[None]:
        """Record the run, and save now and then, if there is a folder for it."""
        if self.out is None:
            yield
            return
        checkpoint = self.out / "checkpoint"
        if self.run_snapshot is None:
            discard(checkpoint)
        if self.options.reshape:  # neither a snapshot's parts nor a record's machines would be the same all the time
            yield
            return
        if self.program.stages is None and not isinstance(self.out, UrlPath):  # an object cannot grow, as a record does
            facts = facts_now(self.spec, native=can_be_native(self.program.dtype), threads=threads)
            self.recording = Recording(self.out, facts, self.run_snapshot)
            self.on_entry = self.recording.on_entry
        else:
            why = f"{self.out} is a URL" if self.program.stages is None else f"{self.spec.strategy} cuts the model"
            print(f"note: {why}, so no record is kept, and the run cannot be replayed", file=sys.stderr)
            if self.program.stages is not None and self.run_snapshot is None:
                files.remove(self.out / "record")  # of a run that this folder had before
        self.program.leave_model(checkpoint)
        self.saves = SnapshotSaves(
            checkpoint,
            self.coordinator,
            self.common,
            workers=self.spec.workers,
            every=self.options.checkpoint_every,
            last=self.run_snapshot,
            step=lambda: self.tally.last_step,
            on_order=(lambda: None) if self.recording is None else self.recording.flush,
            callbacks=str if self.host is None else self.host.state,
            on_saved=self._record_saved,
        )
        self.tally.on_save = self.saves.want
        if self._saves_if_lost:
            number = number_after(0 if self.run_snapshot is None else self.run_snapshot.number)
            self._lost = LauncherPart(self.saves, number, _EVERY_S if isinstance(self.out, UrlPath) else 1.0)
            self._lost.look(0.0)  # before there is any process
        try:
            yield
        finally:
            if self.recording is not None:
                self.recording.close()
        if self._lost is not None:
            self._lost.remove()

    def _record_saved(self, part: RunSnapshot) -> None:
        path = f"checkpoint/{run_snapshot_path(Path(), part.number).name}"
        row = row_of(CheckpointSaved(step=part.step, at_s=part.seconds, path=path))
        self._record(row)
        if self.host is not None:
            self.host.take_row(row)

    # ------------------------------------------------------------------ the processes

    def work(self, role: Role) -> Mapping[str, Any] | None:
        """Be one of the run's processes, with a copy of this one's memory."""
        return act(self.program, role, self._now(), self._mail, self._arenas)

    def setting(self) -> Mapping[str, Any]:
        """The facts for a process without this one's memory, in addition to the `RunSpec`; see `program.perform`."""
        assert self._keeper is not None
        plan = self.plan
        shares = self.options.transport == "shared"
        return {
            "keeper": [self.plan.topology.coordinator, self._keeper.address],
            "keys": self._keys.to_plain(),
            **self._given,
            "memory": {"arenas": plan.most_lives, "bytes": plan.arena_bytes} if shares else None,
            **self._now().to_plain(),
        }

    def _now(self) -> Setting:
        return Setting(
            view=self.coordinator.view,
            zero_s=self._zero_s,
            record=None if self.recording is None else str(self.recording.folder),
            snapshot=None if self.run_snapshot is None else self.run_snapshot.number,
            if_lost=None if self._lost is None else self._lost.number,
            hosts=self.plan.topology.hosts,
        )

    def conduct(self, launcher: Machine) -> None:
        """Be the coordinator's process until the run is over."""
        line = self._mail.mailbox(self.plan.topology.coordinator)
        world = MailWorld(self.plan.topology.coordinator, line, self.plan.hosts, zero_s=self._zero_s)
        try:
            world.drive(serve(world.port, launcher))
        finally:
            line.close(_FAREWELL_S)

    def look(self, now_s: float, out: Outbox) -> None:
        """Save if the interval is over; the launcher calls it now and then, between messages."""
        if self.saves is not None:
            out += self.saves.look(now_s)
        if self._lost is not None and not self.scheduler.finished:
            self._lost.look(now_s)

    # ------------------------------------------------------------------ the end

    def outcome(self, ended: Sequence[EngineProcess]) -> ServedOutcome:
        """The answers of the processes, together."""
        attendances, excerpts, stages = [], list[dict[str, Any]](), dict[int, dict[str, Any]]()
        threads, finals = 1, dict[str, str]()
        sent = {"worker": 0, "copy": 0}
        for process in ended:
            role = process.role
            if role.kind == "evaluator" or process.result is None:
                continue
            told = json.loads(process.result)
            sent[role.kind] += told["bytes"]
            excerpts.append(told)
            if role.kind == "worker" and told["stage"] is not None:
                stages[told["stage"]["stage"]] = told["stage"]
            if role.node in self.plan.topology.firsts and told["sha256"] is not None:
                attendances.append(Attendance(*told["attendance"]))
                finals[f"{role.node}.{role.incarnation}"], threads = told["sha256"], told["threads"]
        if not attendances:
            raise PolytempoError("no worker lived to the end of the run; look into its logs")
        trace_hash = combined_hash(sorted(told["hash"] for told in excerpts))
        return ServedOutcome(
            *(attendances, next(iter(finals.values())), sent, finals, threads, joined(excerpts), trace_hash),
            stages=[stages[number] for number in sorted(stages)],
        )

    def result(self, outcome: ServedOutcome) -> Result:
        """The run in numbers."""
        attendances = outcome.attendances
        idle_s = sum(a.idle_s for a in attendances)
        totals = ServedTotals(
            world="process",
            attendances=attendances,
            statistics=[shard for _, shard in sorted(self.coordinator.statistics.items())],
            idle_share=lambda seconds: idle_s / (len(attendances) * seconds),
            worker_bytes=outcome.bytes_sent["worker"],
            server_bytes=outcome.bytes_sent["copy"],
            threads=outcome.threads,
            parameters_sha256=outcome.sha256,
            trace_hash=outcome.trace_hash,
            stages=outcome.stages,
            server_facts=self.events.facts,
        )
        return self.tally.result(totals)

    def leave_trace(self, outcome: ServedOutcome, out: Place) -> None:
        """Write the trace of all processes, and the end of the record."""
        if self.saves is not None:
            leave_end(out, 0 if self.run_snapshot is None else self.run_snapshot.generation + 1, outcome.finals)
        events, dropped = outcome.events
        write_chrome_trace(
            out / "trace.json", events, title=f"{self.spec.job.name}, {self.spec.strategy}", dropped=dropped
        )
