"""`Rerun`: performs a recorded run with a parameter server again, in the virtual world.

    records ──▶ orders ──▶ shards, coordinator     each takes the messages of the run, in their order
                            ▲        │
                            └── lives of workers   the programs of the run; a killed one ends where its record ends

Every life of a worker is a rank of its own, so that its messages cannot be taken for the next life's messages. The
replay is over when no machine can go on, at the end of the records.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polytempo.cluster import Cluster, Link
from polytempo.core import Deadlock, Op, Port, Program, Strategy, interpreted
from polytempo.core.op import Take
from polytempo.replay.message_order import Life, MessageOrder, OrderedCoordinator, OrderedShard, ReplayProgress, Stop
from polytempo.replay.records import Recorded
from polytempo.report.status.rows import METRIC_KINDS
from polytempo.runs.frame.run_frame import torch_threads
from polytempo.runs.served.recording import RunFacts
from polytempo.runs.served.run_snapshot import resumed
from polytempo.runs.served.served_program import ServedProgram
from polytempo.runs.simulated.virtual_scoring import OffTheClock
from polytempo.server.coordinator.coordinator import Coordinator, Listeners
from polytempo.server.coordinator.saved_schedule import LIVES
from polytempo.server.loop import serve
from polytempo.server.message import View
from polytempo.server.record import requests_of
from polytempo.server.snapshots.snapshot import read
from polytempo.server.tensors.optimizer import can_be_native
from polytempo.server.timing import Timing
from polytempo.spec.job import Job
from polytempo.spec.precision import precision_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.topology import Topology
from polytempo.training.served.served_context import ComputeGradients
from polytempo.training.served.worker_program import Attendance, performed_work
from polytempo.worlds import VirtualWorld

_NEVER = float("inf")
_TIMING = Timing(retry_s=_NEVER, longest_retry_s=_NEVER, beat_s=1e18, lost_s=_NEVER, worker_lost_s=_NEVER)
_INSTANT = Cluster(network=Link(0.0, _NEVER), memory=Link(0.0, _NEVER), flops_per_s=_NEVER, name="replay")


class Rerun:
    """The machines and lives of one replay. `progress.difference` has the first difference from the record."""

    def __init__(
        self, recorded: Recorded, job: Job, strategy: Strategy, data: str | Path | None, stop: Stop | None
    ) -> None:
        assert strategy.server is not None
        facts, shards = recorded.facts, strategy.server.shards
        self.facts = facts
        lives = recorded.lives
        silent = set(range(facts.workers)) - {worker for worker, _ in lives}
        self.rank_of = {life: rank for rank, life in enumerate([*lives, *((worker, 0) for worker in silent)])}
        first = len(self.rank_of)
        chains = tuple((first + shard,) for shard in range(shards))
        self.topology = Topology(tuple(range(facts.workers)), chains, coordinator=first + shards)
        spec = RunSpec.of(job, strategy, facts.workers, options_of(facts, data))
        self.program = ServedProgram(spec, self.topology, see=lambda model, data: _TIMING)
        self.plan = self.program.plan
        entries = [entry for machine in (recorded.coordinator, *recorded.shards) for entry in machine]
        taken = Counter((each.worker, each.incarnation) for entry in entries for each in requests_of(entry))
        self.progress = ReplayProgress(self.rank_of, taken, facts.workers, stop)
        self.rows: list[dict[str, Any]] = []
        self.scored: list[dict[str, Any]] = []
        """The rows about tests, of all scores that could have been taken."""
        self.finals: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.losses: dict[Life, list[float]] = {life: [] for life in self.rank_of}
        self.scheduler = self.program.scheduler()
        self.scores = self._scores()
        self.coordinator = self._coordinator(recorded)
        self.shards = [self._shard(recorded, shard) for shard in range(shards)]
        self.orders = [
            MessageOrder(f"shard {n}", entries, machine, self.progress, 1 + recorded.begins[n])
            for n, (machine, entries) in enumerate(zip(self.shards, recorded.shards, strict=True))
        ]
        for shard, order in zip(self.shards, self.orders, strict=True):
            shard.order = order
        machine = OrderedCoordinator(self.coordinator, self.progress)
        self.orders.append(MessageOrder("the coordinator", recorded.coordinator, machine, self.progress))

    def perform(self) -> None:
        """Run until no machine can go on."""
        try:
            with torch_threads(self.facts.threads):
                VirtualWorld(_INSTANT, self.topology.num_nodes, seed=self.program.spec.seed).run(self._act)
        except Deadlock as end:
            if end.__cause__ is not None:  # not the end of the records: a machine has failed
                raise end.__cause__ from end

    # ------------------------------------------------------------------ machines

    def _coordinator(self, recorded: Recorded) -> Coordinator:
        scheduler = self.scheduler
        if recorded.start is not None:
            found = resumed(recorded.start, len(self.topology.chains), {})
            scheduler.load(found.scheduler, found.applied)
            for first, last in found.applied[0]:
                self.progress.pushed.add(first, last)
        first = self.facts.generation * LIVES + 1
        return self.plan.coordinator(scheduler, Listeners(on_row=self._on_row), incarnation=first)

    def _on_row(self, text: bytes) -> None:
        row = json.loads(text)
        if row["kind"] in METRIC_KINDS:
            self.rows.append(row)

    def _scores(self) -> OffTheClock | None:
        program = self.program
        if not program.scores:
            return None
        points = program.points
        return OffTheClock(points, program.scorer(), program.dtype, self.scored.append, lambda: 0.0)

    def _shard(self, recorded: Recorded, number: int) -> OrderedShard:
        """The shard as it was when the run began, or went on."""
        native = self.facts.native and can_be_native(self.program.dtype)
        shard = self.plan.shard(number, native=native)
        if recorded.start is not None:
            assert self.facts.snapshot is not None
            saved = read(recorded.start, self.facts.snapshot, number)
            shard.load(saved.state, saved.tensors)
        watcher = None if self.scores is None else self.scores.watcher(shard, lambda: node)
        chains, coordinator = self.topology.chains, self.topology.coordinator
        node = self.plan.copy(chains[number][0], shard, on_entry=watcher)
        node.receive(0.0, coordinator, View(1, chains, ()))
        if self.scores is not None:
            self.scores.begin([shard])
        return OrderedShard(node, self.progress)

    # ------------------------------------------------------------------ lives

    async def _act(self, port: Port) -> None:
        machine = port.rank - self.topology.chains[0][0]
        if machine >= 0:
            await serve(port, self.orders[machine])
        for life, rank in self.rank_of.items():
            if rank == port.rank:
                await self._live(port, life)

    async def _live(self, port: Port, life: Life) -> None:
        """One life, from the cue before its first message to the cue after its last."""
        await port.take(None)
        worker, incarnation = life
        client = self.plan.client(worker, incarnation)
        context = self.program.context()
        context.out = None  # the job's functions logged while the run went on
        context = replace(context, compute_gradients=_noting(context.compute_gradients, self.losses[life]))
        others = {w: rank for (w, _), rank in self.rank_of.items()} | {worker: port.rank}
        group = port.among(tuple(others[w] for w in range(self.facts.workers)))  # no message goes to the others
        try:
            attendance = await _until_cue(performed_work(port, group, context, client, None))
        except Exception as error:  # the run had it too, or the orders show a difference
            self.errors[written(life)] = f"{type(error).__name__}: {error}"
            return
        if attendance is not None:
            self.finals[written(life)] = context.sha256()


def options_of(facts: RunFacts, data: str | Path | None) -> RunOptions:
    """The relevant options of the run; `data` may be at another place now."""
    given = dict(facts.options)
    bits = precision_of(given.get("precision"))
    return RunOptions(**{**given, "data": data or given.get("data"), "precision": bits})


def written(life: Life) -> str:
    """A life as it stands in files: "0.1"."""
    return f"{life[0]}.{life[1]}"


def _noting(compute: ComputeGradients, losses: list[float]) -> ComputeGradients:
    """`compute`, with each loss noted."""

    async def noting(port: Port, batch: Any, samples: int) -> torch.Tensor:
        loss = await compute(port, batch, samples)
        losses.append(float(loss))
        return loss

    return noting


class _Cue(BaseException):
    """Nothing more of a program is in the records. The program cannot catch it."""


async def _until_cue(program: Program[Attendance]) -> Attendance | None:
    """The answer of `program`; None if the records end before it."""

    async def perform(op: Op[Any]) -> Any:
        value = await op
        if isinstance(op, Take) and value is not None and isinstance(value[1], View):
            raise _Cue
        return value

    try:
        return await interpreted(program, perform)
    except _Cue:
        return None
