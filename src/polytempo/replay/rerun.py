"""`Rerun`: a recorded run with a parameter server once more, in the virtual world.

    records ──▶ gates ──▶ shards, coordinator      each takes in what it took in then, in that order
                            ▲        │
                            └── lives of workers   the programs of the run; one that was killed is not heard to its end

Every life of a worker is a rank of its own, so that its messages cannot be taken for those of the next one. The replay
is over when nobody can go on; that is where the records end.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from polytempo.cluster import Cluster, Link
from polytempo.core import Deadlock, Op, Port, Program, Strategy, interpreted
from polytempo.core.op import Take
from polytempo.data.batches import Batches
from polytempo.engines.cast import cast_of, context_of, dtype_of, points_of, scheduler_of, service_of
from polytempo.engines.recording import RunFacts
from polytempo.engines.run_snapshot import LIVES, resumed
from polytempo.engines.virtual_scoring import OffTheClock
from polytempo.replay.message_order import Life, MessageOrder, OrderedCoordinator, OrderedShard, ReplayProgress, Stop
from polytempo.replay.records import Recorded
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.layout import part, shard_map
from polytempo.server.loop import serve
from polytempo.server.message import View
from polytempo.server.record import Asking, PullEntry, PushEntry
from polytempo.server.shard.node import Node
from polytempo.server.shard.optimizer import can_be_native
from polytempo.server.shard.shard import Shard
from polytempo.server.shard.snapshot import read
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.server_calls import through
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of, optimizer_of
from polytempo.spec.options import RunOptions
from polytempo.spec.result import parameters_sha256
from polytempo.training.running_statistics import Running
from polytempo.training.scorer import Scorer
from polytempo.training.served_context import ComputeGradients
from polytempo.training.server_worker import Attendance, work
from polytempo.training.shard_rule import flat_of, parameters_of
from polytempo.worlds import VirtualWorld

_NEVER = float("inf")
_TIMING = Timing(retry_s=_NEVER, longest_retry_s=_NEVER, beat_s=1e18, lost_s=_NEVER, worker_lost_s=_NEVER)
_INSTANT = Cluster(network=Link(0.0, _NEVER), memory=Link(0.0, _NEVER), flops_per_s=_NEVER, name="replay")


class Rerun:
    """Everybody of one replay. `play.difference` and what the gates say tell how it went."""

    def __init__(self, recorded: Recorded, job: Job, strategy: Strategy, data: Path | None, stop: Stop | None) -> None:
        assert strategy.server is not None
        facts = recorded.facts
        self.facts, self.job, self.strategy = facts, job, strategy
        self.options = options_of(facts, data)
        self.service = strategy.server
        self.data = data_of(job, self.options.data)
        self.batches = Batches(
            self.data.training(),
            size=facts.workers,
            batch_size=self.options.batch_size or job.batch_size,
            seed=self.options.seed,
            deals=self.service.deals,
        )
        model, optimizer = self._replica()
        self.dtype = dtype_of(model)
        self.parameters = parameters_of(model, optimizer, strategy)
        self.spans = shard_map(self.parameters, self.service.shards)
        lives = recorded.lives
        silent = set(range(facts.workers)) - {worker for worker, _ in lives}
        self.rank_of = {life: rank for rank, life in enumerate([*lives, *((worker, 0) for worker in silent)])}
        first = len(self.rank_of)
        self.chains = [(first + shard,) for shard in range(self.service.shards)]
        self.coordinator_rank = first + self.service.shards
        entries = [entry for machine in (recorded.coordinator, *recorded.shards) for entry in machine]
        taken = Counter((e.worker, e.incarnation) for e in entries if isinstance(e, Asking | PullEntry | PushEntry))
        self.play = ReplayProgress(self.rank_of, taken, facts.workers, stop)
        self.rows: list[dict[str, Any]] = []
        self.scored: list[dict[str, Any]] = []
        """The rows about tests, of all scores that could have been taken."""
        self.finals: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.losses: dict[Life, list[float]] = {life: [] for life in self.rank_of}
        self.scheduler = scheduler_of(
            self.service, self.batches, job, self.options, has_test=self.data.test is not None
        )
        self.scores = self._scores()
        self.coordinator = self._coordinator(recorded)
        self.doors = [self._door(recorded, shard) for shard in range(self.service.shards)]
        self.gates = [
            MessageOrder(f"shard {n}", entries, door, self.play, 1 + recorded.begins[n])
            for n, (door, entries) in enumerate(zip(self.doors, recorded.shards, strict=True))
        ]
        for door, gate in zip(self.doors, self.gates, strict=True):
            door.gate = gate
        entrance = OrderedCoordinator(self.coordinator, self.play)
        self.gates.append(MessageOrder("the coordinator", recorded.coordinator, entrance, self.play))

    def perform(self) -> None:
        """ReplayProgress until nobody can go on."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.facts.threads)
        try:
            VirtualWorld(_INSTANT, self.coordinator_rank + 1, seed=self.options.seed).run(self._program)
        except Deadlock as end:
            if end.__cause__ is not None:  # not the end of the records: a machine has failed
                raise end.__cause__ from end
        finally:
            torch.set_num_threads(threads)

    # ------------------------------------------------------------------ machines

    def _coordinator(self, recorded: Recorded) -> Coordinator:
        facts = self.facts
        scheduler = self.scheduler
        if recorded.start is not None:
            found = resumed(recorded.start, self.service.shards, {})
            scheduler.load(found.scheduler, found.applied)
            for first, last in found.applied[0]:
                self.play.pushed.add(first, last)
        return Coordinator(
            self.coordinator_rank,
            cast_of(self.service, facts.workers).workers,
            self.chains,
            scheduler,
            _TIMING,
            incarnation=facts.generation * LIVES + 1,
            on_row=self._on_row,
        )

    def _on_row(self, text: bytes) -> None:
        self.rows.append(json.loads(text))

    def _scores(self) -> OffTheClock | None:
        if self.data.test is None:
            return None
        scorer = Scorer(self.job, self.data, self.batches, *self._replica())
        return OffTheClock(points_of(self.batches, self.scheduler), scorer, self.dtype, self.scored.append, lambda: 0.0)

    def _door(self, recorded: Recorded, number: int) -> OrderedShard:
        """The shard as it was when the run began, or went on."""
        model, optimizer = self._replica()
        spans = self.spans[number]
        weights = part(flat_of(model, optimizer), spans).clone()
        service = service_of(self.service, self.job, optimizer, self.batches, self.options)
        native = self.facts.native and can_be_native(self.dtype)
        running = Running(model).vector()
        shard = Shard(number, self.parameters, spans, weights, service, native=native, running=running)
        if recorded.start is not None:
            assert self.facts.snapshot is not None
            saved = read(recorded.start, self.facts.snapshot, number)
            shard.load(saved.state, saved.tensors)
        watcher = None if self.scores is None else self.scores.watcher(shard, lambda: node)
        node = Node(self.chains[number][0], shard, self.coordinator_rank, _TIMING, on_entry=watcher)
        node.receive(0.0, self.coordinator_rank, View(1, tuple(self.chains), ()))
        if self.scores is not None:
            self.scores.begin([shard])
        return OrderedShard(node, self.play)

    # ------------------------------------------------------------------ lives

    async def _program(self, port: Port) -> None:
        machine = port.rank - self.chains[0][0]
        if machine >= 0:
            await serve(port, self.gates[machine])
        for life, rank in self.rank_of.items():
            if rank == port.rank:
                await self._live(port, life)

    async def _live(self, port: Port, life: Life) -> None:
        """One life, from when its first message was due to when its last one had come."""
        await port.take(None)
        worker, incarnation = life
        model, optimizer = self._replica()
        client = Client(
            worker,
            incarnation,
            self.spans,
            self.chains,
            self.coordinator_rank,
            _TIMING,
            dtype=self.dtype,
            parameters=self.parameters,
            codec=self.service.codec,
            pull_codec=self.service.pull_codec,
        )
        context = context_of(self.job, self.strategy, self.options, self.data, self.batches, model, optimizer)
        context.compute_gradients = _noting(context.compute_gradients, self.losses[life])
        others = {w: rank for (w, _), rank in self.rank_of.items()} | {worker: port.rank}
        group = port.among(tuple(others[w] for w in range(self.facts.workers)))  # nobody talks to them
        try:
            attendance = await _until_cue(through(client, port, work(group, context, client)))
        except Exception as error:  # the run had it too, or something differs: the gates tell
            self.errors[written(life)] = f"{type(error).__name__}: {error}"
            return
        if attendance is not None:
            self.finals[written(life)] = parameters_sha256(model.parameters())

    def _replica(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.options.seed)
        model = model_of(self.job)
        return model, optimizer_of(self.job, model, self.options.lr)


def options_of(facts: RunFacts, data: Path | None) -> RunOptions:
    """The run's options, as far as they matter; `data` may lie elsewhere now."""
    given = dict(facts.options)
    return RunOptions(**{**given, "data": data or given.get("data")})


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
    """What `program` returns; None if it is told that nothing more of it is in the records."""

    async def perform(op: Op[Any]) -> Any:
        value = await op
        if isinstance(op, Take) and value is not None and isinstance(value[1], View):
            raise _Cue
        return value

    try:
        return await interpreted(program, perform)
    except _Cue:
        return None
