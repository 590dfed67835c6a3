"""`simulate` for strategies with a parameter server: workers, copies of shards and the coordinator are virtual ranks.

    rank   0 … W-1 workers     │ W … copies of shards │ the coordinator
    host   as the cluster says │ one each             │ one

The coordinator stands for the launcher too: it knows of a crash after the cluster's `detection_s`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from polytempo.cluster import Cluster
from polytempo.core import PolytempoError, Port, Strategy
from polytempo.core.files import run_folder
from polytempo.data.batches import Batches
from polytempo.engines.capacity import check_simulated
from polytempo.engines.cast import Cast, cast_of, context_of, dtype_of, points_of, scheduler_of, service_of
from polytempo.engines.reshaping import Reshapes, num_added
from polytempo.engines.run_page import reported, show_rows
from polytempo.engines.tally import Tally
from polytempo.engines.virtual_scoring import OffTheClock
from polytempo.report.metrics import MetricsWriter
from polytempo.report.progress import Progress
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.coordinator.resharding import Reshaper
from polytempo.server.layout import part, shard_map
from polytempo.server.loop import serve
from polytempo.server.message import Message, Outbox, View
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.server_calls import through
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of, optimizer_of
from polytempo.spec.options import RunOptions
from polytempo.spec.result import Result, parameters_sha256
from polytempo.training.flops import flops_per_sample
from polytempo.training.running_statistics import Running
from polytempo.training.scorer import Scorer
from polytempo.training.served_context import ServedContext
from polytempo.training.server_worker import Attendance, work
from polytempo.training.shard_rule import flat_of, parameters_of
from polytempo.training.trainer import recorder
from polytempo.worlds import Outcome, VirtualWorld, write_chrome_trace

_BEAT_STEPS, _RETRY_STEPS, _LOST_STEPS, _DEADLINE_STEPS = 50, 200, 2_000, 100_000
"""Waiting times in units of a step's time: nothing is lost on a virtual network, so nothing need be sent twice."""


def simulate_served(
    job: Job,
    strategy: Strategy,
    workers: int,
    cluster: Cluster,
    options: RunOptions,
    progress: Progress | None = None,
    *,
    native: bool = False,
) -> Result:
    """Train `job` with `workers` virtual workers and the parameter server that `strategy` asks for.

    `native`: the shards' optimizer by the native kernel; otherwise by torch's operations, so that one worker without
    delay gets the bits of plain torch.
    """
    run = _Run(job, strategy, workers, cluster, options, native)
    with ExitStack() as files:
        show = files.enter_context(show_rows(progress, options, f"{job.name}, {strategy}, {workers} virtual workers"))
        writer = None
        if options.out is not None:
            run_folder(options.out)
            writer = files.enter_context(MetricsWriter(options.out / "metrics.jsonl"))
        run.tally.record = recorder(writer, show)
        outcome = run.world.run(run.program)
        return run.finish(outcome)


class _Run:
    """Everything of one simulated run."""

    def __init__(
        self, job: Job, strategy: Strategy, workers: int, cluster: Cluster, options: RunOptions, native: bool
    ) -> None:
        assert strategy.server is not None
        self.job, self.strategy, self.service, self.options = job, strategy, strategy.server, options
        self.native = native
        self.cast = cast_of(self.service, workers, num_added(self.service.shards, options.reshape))
        self.data = data_of(job, options.data)
        batch_size = options.batch_size or job.batch_size
        self.batches = Batches(
            self.data.training(), size=workers, batch_size=batch_size, seed=options.seed, deals=self.service.deals
        )
        model = _model(job, options.seed)
        check_simulated(model, self.data, workers)
        self.flops = flops_per_sample(job, model, self.data, options.seed)
        step_s = _step_s(model, self.batches.batch_size * self.flops, workers, cluster)
        self.timing = Timing(
            retry_s=_RETRY_STEPS * step_s,
            longest_retry_s=_RETRY_STEPS * step_s,
            beat_s=_BEAT_STEPS * step_s,
            lost_s=_LOST_STEPS * step_s,
            worker_lost_s=_LOST_STEPS * step_s,
            deadline_s=_DEADLINE_STEPS * step_s,
            starting_s=_LOST_STEPS * step_s,
        )
        self.parameters = parameters_of(model, _optimizer(job, model, options), strategy)
        self.spans = shard_map(self.parameters, self.service.shards)
        self.world = VirtualWorld(
            replace(cluster, servers=self.cast.num_servers), self.cast.coordinator + 1, seed=options.seed
        )
        self.courses = [self._context() for _ in self.cast.workers]
        self.scheduler = scheduler_of(self.service, self.batches, job, options, has_test=self.data.test is not None)
        self.tally = Tally(job, strategy, self.service, options, self.batches, self.scheduler, workers=workers)
        self.coordinator = Coordinator(
            self.cast.coordinator,
            self.cast.workers,
            self.cast.chains,
            self.scheduler,
            self.timing,
            on_row=self.tally.take,
            on_event=lambda event: self.reshapes.hear(event),
            reshaper=Reshaper(self.parameters, self.spans),
        )
        self.reshapes = Reshapes(
            self.coordinator,
            options.reshape,
            self.cast.spares,
            lambda shard, nodes: None,  # they are there already
        )
        self.tally.stop = self.coordinator.stop
        self.scores = self._scores(dtype_of(model))
        self.nodes = self._nodes(model)

    async def program(self, port: Port) -> Attendance | None:
        """What each rank does. Where one fails, the machines end, so that the world does."""
        try:
            if port.rank in self.cast.workers:
                return await self._work(port)
            if port.rank in self.nodes:
                await serve(port, self.nodes[port.rank])
                return None
            await serve(port, _Launcher(self.coordinator, self.world, self.cast, self.reshapes))
            for node in self.nodes.values():  # also those that were never needed, or are not any more
                node.finished = True
        except Exception:
            self.coordinator.finished = True
            for node in self.nodes.values():
                node.finished = True
            raise
        return None

    async def _work(self, port: Port) -> Attendance:
        context = self.courses[port.rank]
        client = Client(
            port.rank,
            1,
            self.spans,
            self.cast.chains,
            self.cast.coordinator,
            self.timing,
            dtype=dtype_of(context.model),
            parameters=self.parameters,
            codec=self.service.codec,
            pull_codec=self.service.pull_codec,
        )
        return await through(client, port, work(port.among(self.cast.workers), context, client))

    def _context(self) -> ServedContext:
        model = _model(self.job, self.options.seed)
        optimizer = _optimizer(self.job, model, self.options)
        return context_of(self.job, self.strategy, self.options, self.data, self.batches, model, optimizer, self.flops)

    def _scores(self, dtype: torch.dtype) -> OffTheClock | None:
        if self.data.test is None:
            return None
        model = _model(self.job, self.options.seed)
        scorer = Scorer(self.job, self.data, self.batches, model, _optimizer(self.job, model, self.options))
        points = points_of(self.batches, self.scheduler)
        return OffTheClock(points, scorer, dtype, self.tally.take_row, lambda: self.world.now_s)

    def _nodes(self, model: nn.Module) -> dict[int, Node]:
        """The copies of the shards, each with the first view: so nobody's first request comes too early."""
        optimizer = _optimizer(self.job, model, self.options)
        flat, running = flat_of(model, optimizer), Running(model).vector()
        service = service_of(self.service, self.job, optimizer, self.batches, self.options)
        view = View(1, self.cast.chains, ())
        nodes: dict[int, Node] = {}
        for number, chain in enumerate((*self.cast.chains, *self.cast.spares)):
            for node in chain:
                spans = self.spans[number] if number < len(self.spans) else ()
                mine = part(flat, spans)
                shard = Shard(number, self.parameters, spans, mine, service, native=self.native, running=running)
                watcher = None if self.scores is None else self.scores.watcher(shard, partial(nodes.__getitem__, node))
                nodes[node] = Node(node, shard, self.cast.coordinator, self.timing, on_entry=watcher)
                nodes[node].receive(0.0, self.cast.coordinator, view)
        return nodes

    # ------------------------------------------------------------------ the end

    def finish(self, outcome: Outcome[Attendance | None]) -> Result:
        """The result of the run, and what it leaves in its folder."""
        attendances = [attendance for attendance in outcome.results if attendance is not None]
        if not attendances:
            raise PolytempoError("no worker lived to the end of the run; let fewer of them crash")
        if self.scores is not None and not self.scheduler.stopped:
            self.scores.end(self.nodes[chain[0]].shard for chain in self.coordinator.chains if chain)
        result = self._result(outcome, attendances)
        out = self.options.out
        if out is None:
            return result
        trace, title = outcome.trace, f"{result.job}, {result.strategy}, simulated"
        write_chrome_trace(out / "trace.json", trace.events, title=title, dropped=trace.dropped)
        result.write(out)
        return reported(result, out)

    def _result(self, outcome: Outcome[Attendance | None], attendances: list[Attendance]) -> Result:
        workers, trace = len(self.cast.workers), outcome.trace
        computing_s = sum(s for (rank, op), s in trace.seconds.items() if op == "compute" and rank < workers)
        sent = [trace.bytes_sent.get(rank, 0) for rank in range(self.cast.coordinator)]
        return self.tally.result(
            "virtual",
            attendances,
            [shard for _, shard in sorted(self.coordinator.statistics.items())],
            idle_share=lambda seconds: 1 - computing_s / (workers * seconds),
            worker_bytes=sum(sent[:workers]),
            server_bytes=sum(sent[workers:]),
            threads=torch.get_num_threads(),
            parameters_sha256=parameters_sha256(self.courses[attendances[0].worker].model.parameters()),
            trace_hash=trace.hash,
        )


class _Launcher:
    """The coordinator with the eyes of the launcher that it lives in: whose process has ended is lost at once."""

    def __init__(self, coordinator: Coordinator, world: VirtualWorld, cast: Cast, reshapes: Reshapes) -> None:
        self._coordinator, self._world, self._cast, self._reshapes = coordinator, world, cast, reshapes
        self._noticed: set[int] = set()

    @property
    def finished(self) -> bool:
        """As the coordinator says."""
        return self._coordinator.finished

    @finished.setter
    def finished(self, value: bool) -> None:
        """End it."""
        self._coordinator.finished = value

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The coordinator's answer."""
        out = self._losses(now_s) + self._coordinator.receive(now_s, source, message)
        return out + self._reshapes.look(now_s)

    def tick(self, now_s: float) -> Outbox:
        """What the coordinator does as time passes."""
        return self._losses(now_s) + self._coordinator.tick(now_s) + self._reshapes.look(now_s)

    def wait_s(self, now_s: float) -> float:
        """As long as the coordinator waits, or until a death is known."""
        due = (s + self._world.cluster.detection_s for rank, s in self._dead())
        return max(0.0, min([self._coordinator.wait_s(now_s), *(at_s - now_s for at_s in due)]))

    def flops(self, message: Message) -> float:
        """The coordinator's work is free."""
        return 0.0

    def _dead(self) -> list[tuple[int, float]]:
        return [(rank, s) for rank, s in self._world.lost.items() if rank not in self._noticed]

    def _losses(self, now_s: float) -> Outbox:
        out: Outbox = []
        for rank, dead_s in self._dead():
            if now_s >= dead_s + self._world.cluster.detection_s:
                self._noticed.add(rank)
                out += self._coordinator.lose(now_s, rank)
        if self._noticed.issuperset(self._cast.workers):
            raise PolytempoError("every worker is lost, so nobody can go on; let fewer of them crash")
        return out


def _model(job: Job, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model_of(job)


def _optimizer(job: Job, model: nn.Module, options: RunOptions) -> torch.optim.Optimizer:
    return optimizer_of(job, model, options.lr)


def _step_s(model: nn.Module, flops: float, workers: int, cluster: Cluster) -> float:
    """About how long a step takes: its computation, and everybody's way to one server and back."""
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    network = cluster.network
    return flops / cluster.flops_per_s + 4 * network.latency_s + 2 * workers * num_bytes / network.bytes_per_s
