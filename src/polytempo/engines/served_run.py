"""`ServedRun`: one run with a parameter server on real processes. What each of them does, and what comes of it.

home/mail/n3    node 3's mailbox (ipc)         arenas   one for each life of a process, made before the forks
out/checkpoint  the shards' snapshots          out/record   what met each shard in which order
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import PolytempoError
from polytempo.engines.events import RunEvents
from polytempo.engines.mailbox_directory import MailboxDirectory
from polytempo.engines.recording import CopyRecorder, Recording, facts_now, has_ended
from polytempo.engines.run_snapshot import LIVES, SnapshotSaves, discard, go_on, resumed, shard_saves
from polytempo.engines.served_program import ServedProgram
from polytempo.engines.supervisor import Role
from polytempo.engines.tally import Tally
from polytempo.engines.worker import result_path
from polytempo.engines.worker_processes import Worker
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.coordinator.evaluator import Evaluator
from polytempo.server.coordinator.resharding import Reshaper
from polytempo.server.loop import Machine, serve
from polytempo.server.message import Entry as ShardEntry
from polytempo.server.message import Outbox
from polytempo.server.pieces import without_tables
from polytempo.server.record import Entry
from polytempo.server.shard.node import Node
from polytempo.server.shard.optimizer import can_be_native
from polytempo.server.shard.score_snapshots import MOST as SNAPSHOTS
from polytempo.server.shard.score_snapshots import ScoreSnapshots, Showing
from polytempo.server.shard.snapshot import believed, read
from polytempo.server.timing import Timing
from polytempo.server.worker.lent_gradients import LentGradients
from polytempo.server.worker.server_calls import through
from polytempo.spec.result import Result, parameters_sha256
from polytempo.spec.run_spec import RunSpec
from polytempo.training.server_worker import Attendance, work
from polytempo.wire.shared import Arenas
from polytempo.worlds import MOST_WRITTEN, Joined, combined_hash, joined, write_chrome_trace
from polytempo.worlds.mail import MailWorld

_SPARE_BUFFERS = 12
"""So many vectors as large as the parameters fit into an arena, beside one for each worker."""
_SPARE_BYTES = 64 << 20
_SLOWLY_BYTES_PER_S = 100e6
"""A copy is not thought dead for touching its parameters at this rate."""
_FAREWELL_S = 0.2
"""How long the launcher's last words may take to leave; some of them are for nodes that are dead."""


class ServedOutcome(NamedTuple):
    """What the processes left."""

    attendances: list[Attendance]
    sha256: str | None
    bytes_sent: dict[str, int]
    """By workers and by copies."""
    finals: dict[str, str]
    """The hash of each worker's final weights, by worker and life."""
    threads: int
    events: Joined
    trace_hash: str


class ServedRun:
    """Made in the launcher before it forks, so that every process has it."""

    def __init__(self, spec: RunSpec, home: Path) -> None:
        self.spec, self.options = spec, spec.options
        self.home = home
        self.out = None if spec.options.out is None else spec.options.out.absolute()
        self.program = program = ServedProgram(spec)
        self.topology = program.topology
        num_bytes = program.weights.nbytes
        busy_s = num_bytes / _SLOWLY_BYTES_PER_S  # a copy says nothing while it applies an update
        self.timing = Timing(deadline_s=self.options.timeout_s).of_processes(busy_s)
        self.evaluator = self.topology.evaluator if program.scores else None
        self.most_lives = self.topology.num_nodes + self.options.restarts + 1
        vectors = spec.workers + _SPARE_BUFFERS + SNAPSHOTS
        dense_bytes = sum(p.numel for p in without_tables(program.parameters)) * program.dtype.itemsize
        self.arenas = Arenas(self.most_lives, vectors * dense_bytes + _SPARE_BYTES)
        self.mail = MailboxDirectory(home, self.options.transport, self.arenas, (2 * spec.workers + 8) * num_bytes)
        self.on_event: Callable[[tuple[str, int]], None] = lambda event: None
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        self.scheduler = program.scheduler()
        self._resume()
        self.tally = Tally(program, self.scheduler, self.run_snapshot)
        self.coordinator = self._coordinator()
        self.tally.stop = self.coordinator.stop
        self.recording: Recording | None = None
        self.saves: SnapshotSaves | None = None
        self.events = RunEvents()
        self._zero_s = time.monotonic()  # of all processes' clocks: training begins as soon as they are started

    def _coordinator(self) -> Coordinator:
        return Coordinator(
            self.topology.coordinator,
            self.topology.workers,
            self.topology.chains,
            self.scheduler,
            self.timing,
            incarnation=self.incarnation,
            on_row=self.tally.take,
            on_event=lambda event: self.on_event(event),
            on_entry=lambda entry: self.on_entry(entry),
            reshaper=Reshaper(self.program.parameters, self.program.spans),
            evaluator=self.evaluator,
        )

    def _resume(self) -> None:
        """Take over where the saved run stood, if this one goes on from one."""
        options, batches, service = self.options, self.program.batches, self.program.service
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
        self.incarnation = (found.run_snapshot.generation + 1) * LIVES + 1
        go_on(self.scheduler, found, folder)
        self.scored_again = found.scored_again(self.program.points(self.scheduler), batches)
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
        """Record what happens, and save now and then, where there is a folder for it."""
        if self.out is None:
            yield
            return
        checkpoint = self.out / "checkpoint"
        if self.run_snapshot is None:
            discard(checkpoint)
        if self.options.reshape:  # neither a snapshot's parts nor a record's machines would be the same all the time
            yield
            return
        facts = facts_now(self.spec, native=can_be_native(self.program.dtype), threads=threads)
        self.recording = Recording(self.out, facts, self.run_snapshot)
        self.on_entry = self.recording.on_entry
        self.saves = SnapshotSaves(
            checkpoint,
            self.coordinator,
            self.common,
            workers=self.spec.workers,
            every=self.options.checkpoint_every,
            last=self.run_snapshot,
            step=lambda: self.tally.last_step,
            on_order=self.recording.flush,
        )
        try:
            yield
        finally:
            self.recording.close()

    # ------------------------------------------------------------------ what the processes do

    def part(self, role: Role) -> Mapping[str, Any] | None:
        """What a process does; it runs in it."""
        if role.kind == "evaluator":
            self._evaluate(role)
            return None
        return self._worker(role) if role.kind == "worker" else self._copy(role)

    def conduct(self, launcher: Machine) -> None:
        """Be the coordinator's process until the run is over."""
        mail = self.mail.mailbox(self.topology.coordinator)
        world = MailWorld(self.topology.coordinator, mail, self._hosts, zero_s=self._zero_s)
        try:
            world.drive(serve(world.port, launcher))
        finally:
            mail.close(_FAREWELL_S)

    @property
    def _hosts(self) -> list[int]:
        return [0] * (self.topology.coordinator + self.options.restarts + 2)

    def _worker(self, role: Role) -> Mapping[str, Any]:
        def empty(numel: int, dtype: torch.dtype) -> Tensor:
            return self.arenas.empty(role.life, numel, dtype)

        outgoing = LentGradients(empty, lambda tensor: self.arenas.reference(tensor) is not None)
        chains = self.coordinator.chains
        client = self.program.client(role.node, role.incarnation, self.timing, chains, empty=empty, outgoing=outgoing)
        context = self.program.context()
        mail = self.mail.mailbox(role.node, own_process=True)
        world = MailWorld(role.node, mail, self._hosts, zero_s=self._zero_s)
        try:
            program = work(world.port.among(self.topology.workers), context, client)
            attendance = world.drive(through(client, world.port, program))
        finally:
            mail.close(linger_s=1.0)
        return self._told(world) | {
            "attendance": list(attendance),
            # who came when the run was over has not got the final weights
            "sha256": None if client.finished else parameters_sha256(context.model.parameters()),
            "threads": torch.get_num_threads(),
        }

    def _evaluate(self, role: Role) -> None:
        scorer = self.program.scorer()

        def score(number: int, seconds: float, flat: Tensor, running: Tensor | None) -> bytes:
            return json.dumps(scorer.row(number, seconds, flat, running)).encode()

        chains, timing = self.coordinator.chains, self.timing
        evaluator = Evaluator(
            role.node, self.topology.coordinator, chains, scorer.numel, self.program.dtype, score, timing
        )
        mail = self.mail.mailbox(role.node, own_process=True)
        world = MailWorld(role.node, mail, self._hosts, zero_s=self._zero_s)
        try:
            world.drive(serve(world.port, evaluator))
        finally:
            mail.close(linger_s=1.0)

    def _copy(self, role: Role) -> Mapping[str, Any]:
        present = self.coordinator.reshaper.spans
        shard = self.program.shard(
            role.shard, present, empty=lambda numel, dtype: self.arenas.empty(role.life, numel, dtype)
        )
        if self.run_snapshot is not None and self.out is not None and not role.blank:
            part_saved = read(self.out / "checkpoint", self.run_snapshot.number, role.shard)
            with believed(self.out / "checkpoint", self.run_snapshot.number, role.shard):
                shard.load(part_saved.state, part_saved.tensors)
        recorder = CopyRecorder(None if self.recording is None else self.recording.folder, shard, role.node)
        snapshots = None if self.evaluator is None else ScoreSnapshots(shard, self.program.points(self.scheduler))

        spans = present[role.shard] if role.shard < len(present) else ()
        saves = shard_saves(role.shard, self.program.parameters, spans, self.options)

        def on_entry(index: int, entry: ShardEntry) -> None:
            recorder.on_entry(index, entry)
            if snapshots is not None:
                snapshots.on_entry(index, entry)
            if saves is not None:
                saves.look()

        node = Node(
            role.node,
            shard,
            self.topology.coordinator,
            self.timing,
            blank=role.blank,
            on_entry=on_entry,
            on_save=None if saves is None else saves.on_save,
        )
        machine = node if snapshots is None else Showing(node, snapshots)
        mail = self.mail.mailbox(role.node, own_process=True)
        world = MailWorld(role.node, mail, self._hosts, zero_s=self._zero_s)
        try:
            for to, message in machine.receive(world.now_s(), self.topology.coordinator, self.coordinator.view):
                mail.post(to, message)
            world.drive(serve(world.port, machine))
        finally:
            recorder.close()
            mail.close(linger_s=1.0)
        if saves is not None:
            saves.close()
        return self._told(world)

    def _told(self, world: MailWorld) -> dict[str, Any]:
        """What every process leaves of its trace."""
        return {
            **world.trace.excerpt(MOST_WRITTEN // self.topology.coordinator + 1),
            "bytes": world.trace.bytes_sent[world.rank],
        }

    def look(self, now_s: float, out: Outbox) -> None:
        """Called by the launcher now and then, between messages."""
        if self.saves is not None:
            out += self.saves.look(now_s)

    # ------------------------------------------------------------------ what comes of it

    def outcome(self, ended: Sequence[tuple[Role, Worker]], home: Path) -> ServedOutcome:
        """Read what the processes left, before their folder goes."""
        attendances, excerpts = [], list[dict[str, Any]]()
        threads, finals = 1, dict[str, str]()
        sent = {"worker": 0, "copy": 0}
        for role, _ in ended:
            path = result_path(home, role.life)
            if role.kind == "evaluator" or not path.exists():
                continue
            told = json.loads(path.read_bytes())
            sent[role.kind] += told["bytes"]
            excerpts.append(told)
            if role.kind == "worker" and told["sha256"] is not None:
                attendances.append(Attendance(*told["attendance"]))
                finals[f"{role.node}.{role.incarnation}"], threads = told["sha256"], told["threads"]
        if not attendances:
            raise PolytempoError("no worker lived to the end of the run; look into its logs")
        trace_hash = combined_hash(sorted(told["hash"] for told in excerpts))
        return ServedOutcome(
            attendances, next(iter(finals.values())), sent, finals, threads, joined(excerpts), trace_hash
        )

    def result(self, outcome: ServedOutcome) -> Result:
        """The run in numbers."""
        attendances = outcome.attendances
        idle_s = sum(a.idle_s for a in attendances)
        return self.tally.result(
            "process",
            attendances,
            [shard for _, shard in sorted(self.coordinator.statistics.items())],
            idle_share=lambda seconds: idle_s / (len(attendances) * seconds),
            worker_bytes=outcome.bytes_sent["worker"],
            server_bytes=outcome.bytes_sent["copy"],
            threads=outcome.threads,
            parameters_sha256=outcome.sha256,
            trace_hash=outcome.trace_hash,
            more=self.events.facts,
        )

    def leave_trace(self, outcome: ServedOutcome, out: Path) -> None:
        """Write the trace of all processes, and the end of the record."""
        if self.recording is not None:
            self.recording.end(outcome.finals)
        events, dropped = outcome.events
        write_chrome_trace(
            out / "trace.json", events, title=f"{self.spec.job.name}, {self.spec.strategy}", dropped=dropped
        )
