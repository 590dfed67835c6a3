"""`simulate` for strategies with a parameter server: workers, copies of shards and the coordinator are virtual ranks.

    rank   0 … W-1 workers     │ W … copies of shards │ the coordinator
    host   as the cluster says │ one each             │ one

The coordinator stands for the launcher too: it knows of a crash after the cluster's `detection_s`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from polytempo.cluster import Cluster
from polytempo.core import PolytempoError, Port, Program
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.calls.refusals import refuse
from polytempo.core.port import world_port
from polytempo.diagnosis.bound import UsedLink
from polytempo.engines.processes.capacity import check_simulated
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.run_page import simulated, virtual_rows
from polytempo.runs.served.reshaping import Reshapes
from polytempo.runs.served.run_snapshot import discard
from polytempo.runs.served.served_program import ServedProgram
from polytempo.runs.served.tally import ServedTotals, Tally
from polytempo.runs.simulated.virtual_scoring import OffTheClock
from polytempo.server.coordinator.coordinator import Coordinator, Listeners
from polytempo.server.loop import serve
from polytempo.server.message import Message, Outbox, View
from polytempo.server.shard.node import Node
from polytempo.server.snapshots.snapshot import check_finite, write
from polytempo.server.timing import Timing
from polytempo.spec.job import Data
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.topology import Topology
from polytempo.training.observe.callback_host import CallbackHost, host_of
from polytempo.training.served.worker_program import Attendance, performed_work
from polytempo.training.step.step_cost import StepCost, step_cost
from polytempo.worlds import Outcome, VirtualWorld
from polytempo.worlds.trace_tail import tail_of

_BEAT_STEPS, _RETRY_STEPS, _LOST_STEPS, _DEADLINE_STEPS = 50, 200, 2_000, 100_000
"""Waiting times in units of a step's time: nothing is lost on a virtual network, so nothing need be sent twice."""


def simulate_served(
    spec: RunSpec, cluster: Cluster, progress: Progress | None = None, *, native: bool = False, meta: bool = False
) -> Result:
    """Train with virtual workers and the parameter server that the run's strategy asks for.

    `native`: the shards' optimizer by the native kernel; otherwise by torch's operations, so that one worker without
    delay gets the bits of plain torch. `meta`: nothing is computed; the result has times alone.
    """
    host = host_of(spec.options)
    with (
        virtual_rows(spec, progress, cluster=cluster.name) as record,
        nullcontext() if host is None else host.running(record),
    ):
        run = ServedSimulation(spec, cluster, record, native=native, meta=meta, host=host)
        return run.finish(run.world.run(run.act))


class ServedSimulation:
    """Everything of one simulated run with a parameter server."""

    def __init__(
        self,
        spec: RunSpec,
        cluster: Cluster,
        record: Callable[[dict[str, Any]], None] = lambda row: None,
        *,
        native: bool = False,
        meta: bool = False,
        host: CallbackHost | None = None,
    ) -> None:
        def see(model: nn.Module, data: Data) -> Timing:
            if not meta:
                check_simulated(model, data, spec.workers)
            self.cost = step_cost(spec, model, data, cluster)
            return _timing(_step_s(model, self.cost, spec, cluster))

        self.spec, self.options, self.native, self.meta = spec, spec.options, native, meta
        served_by = replace(cluster, servers=spec.topology().num_servers)
        hosts = served_by.hosts(spec.topology().num_nodes)
        self.program = program = ServedProgram(spec, spec.topology(hosts), see=see, meta=meta)
        self.plan, self.topology = program.plan, program.plan.topology
        topology = self.topology
        self.world = VirtualWorld(served_by, topology.num_nodes, seed=spec.seed)
        self.world.trace.show_in(tail_of(self.options.out, 0, all_ranks=True))
        self._groups: dict[int, Port] = {}
        if meta and program.stages is None:  # without values there is one model, so all can be one
            self.contexts = [program.context(self.cost)] * spec.workers
        else:
            self.contexts = [program.context(self.cost, self._stages(world_port(w, hosts))) for w in topology.workers]
        for context in self.contexts:
            if context.noise is not None:
                context.noise.sends = False
        self.scheduler = program.scheduler()
        self.coordinator = self.plan.coordinator(
            self.scheduler, Listeners(on_row=self._take, on_event=lambda event: self.reshapes.hear(event))
        )
        self.reshapes = Reshapes(
            self.coordinator,
            spec.options.reshape,
            topology.spares,
            lambda shard, nodes: None,  # they are there already
        )
        self.tally = Tally(program, self.coordinator, record, host=host, least_lost_s=0.0)
        if self.options.out is not None:
            self.tally.on_save = partial(refuse, {"asked checkpoint", "server", "simulated"})
        self._host = host
        for context in self.contexts:
            context.record, context.exchanged = record, self.world.trace.exchanged
        self.scores = self._scores()
        self.nodes = self._nodes()

    def _take(self, text: bytes) -> None:
        """Take a worker's row, with its measured noise."""
        row = json.loads(text)
        noise = self.contexts[row["worker"]].noise if row["kind"] == "train" else None
        self.tally.take_row(row if noise is None else row | noise.row)

    async def act(self, port: Port) -> Attendance | None:
        """Be the rank of `port`. If a rank fails, the machines end, so that the world ends."""
        try:
            if port.rank < self.spec.workers:
                return await self._work(port)
            if port.rank in self.nodes:
                await serve(port, self.nodes[port.rank])
                return None
            launcher = _Launcher(self.coordinator, self.world, self.topology, self.reshapes, self._tell_lost)
            await serve(port, launcher)
            for node in self.nodes.values():  # also unused nodes
                node.finished = True
        except Exception:
            self.coordinator.finished = True
            for node in self.nodes.values():
                node.finished = True
            raise
        return None

    def _tell_lost(self, rank: int, dead_s: float) -> None:
        """Call `on_fault` for a rank that the run goes on without."""
        if self._host is not None:
            who = f"worker {rank}" if rank in self.topology.workers else f"server {rank - self.spec.workers}"
            self._host.faulted(f"{who} crashed at {dead_s:g} s; the others go on")

    def _work(self, port: Port) -> Program[Attendance]:
        client = self.plan.client(port.rank, 1, peers=self.plan.peers_of(port.rank))
        return performed_work(port, self._group(port), self.contexts[port.rank], client, self._stages(port))

    def _group(self, port: Port) -> Port:
        """The workers with the same stage of all replicas, which follow each other. They share the group's lists."""
        stage = self.topology.stage_of(port.rank)
        if stage not in self._groups:
            self._groups[stage] = port.among(self.topology.beside(port.rank))
        shared = self._groups[stage]
        return replace(shared, rank=port.rank - shared.members[0])

    def _stages(self, port: Port) -> Port | None:
        """The group of the replica's stages of a worker; None where it holds the whole model."""
        return None if self.program.stages is None else port.among(self.topology.replica_of(port.rank))

    def _scores(self) -> OffTheClock | None:
        if not self.program.scores:
            return None
        program = self.program
        return OffTheClock(
            *(program.points, program.scorer(), program.dtype, self.tally.take_row, lambda: self.world.now_s),
            running_of=program.running_of,
        )

    def _nodes(self) -> dict[int, Node]:
        """The copies of the shards, each with the first view: so no first request comes too early."""
        topology, nodes = self.topology, dict[int, Node]()
        view = View(1, topology.chains, ())
        for number, chain in enumerate((*topology.chains, *topology.spares)):
            for node in chain:
                shard = self.plan.shard(number, native=self.native)
                watcher = None if self.scores is None else self.scores.watcher(shard, partial(nodes.__getitem__, node))
                nodes[node] = self.plan.copy(node, shard, on_entry=watcher)
                nodes[node].receive(0.0, topology.coordinator, view)
        return nodes

    # ------------------------------------------------------------------ the end

    def finish(self, outcome: Outcome[Attendance | None]) -> Result:
        """The result of the run; its folder gets the result, the trace and the page."""
        attendances = [a for worker in self.topology.firsts if (a := outcome.results[worker]) is not None]
        if not attendances:
            raise PolytempoError("no worker lived to the end of the run; let fewer of them crash")
        if self.scores is not None and not self.scheduler.stopped:
            self.scores.end(self.nodes[chain[0]].shard for chain in self.coordinator.chains if chain)
        if self.options.checkpoint_every is not None:
            self._save()
        result = self._result(outcome, attendances)
        return simulated(result, outcome.trace, self.options.out)

    def _save(self) -> None:
        """Leave the shards' last state in the run's folder: its model is for `checkpoint_model`, not for a resume."""
        assert self.options.out is not None
        folder = self.options.out / "checkpoint"
        discard(folder)
        for number, chain in enumerate(self.coordinator.chains):
            state, tensors = self.nodes[chain[0]].shard.dump()
            if not self.options.allow_nan:
                check_finite(number, tensors)
            write(folder, 1, number, state, tensors)
        self.program.leave_model(folder)

    def _link(self) -> UsedLink:
        """The link between workers and servers."""
        cluster = self.world.cluster
        link = cluster.network if len(set(self.world.hosts)) > 1 else cluster.memory
        return UsedLink(link.latency_s, link.bytes_per_s, assumed=False)

    def _server_busy(self, seconds: float) -> float | None:
        servers = range(self.spec.workers, self.topology.coordinator)
        return max((self.world.computed_s(rank) / seconds for rank in servers), default=0.0) if seconds else None

    def _result(self, outcome: Outcome[Attendance | None], attendances: list[Attendance]) -> Result:
        workers, trace = self.spec.workers, outcome.trace
        computing_s = sum(s for (rank, op), s in trace.seconds.items() if op == "compute" and rank < workers)
        sent = [trace.bytes_sent.get(rank, 0) for rank in range(self.topology.coordinator)]
        totals = ServedTotals(
            world="virtual",
            attendances=attendances,
            statistics=[shard for _, shard in sorted(self.coordinator.statistics.items())],
            idle_share=lambda seconds: 1 - computing_s / (workers * seconds),
            worker_bytes=sum(sent[:workers]),
            server_bytes=sum(sent[workers:]),
            threads=torch.get_num_threads(),
            parameters_sha256=None if self.meta else self.contexts[attendances[0].worker].sha256(),
            trace_hash=trace.hash,
            link=self._link(),
            server_busy=self._server_busy(outcome.seconds),
            stages=[stage.report() for w in self.topology.replica_of(0) if (stage := self.contexts[w].stage)],
        )
        return self.tally.result(totals)


class _Launcher:
    """The coordinator with the launcher's knowledge of lost ranks."""

    def __init__(
        self,
        coordinator: Coordinator,
        world: VirtualWorld,
        topology: Topology,
        reshapes: Reshapes,
        on_lost: Callable[[int, float], None],
    ) -> None:
        self._coordinator, self._world, self._reshapes, self._on_lost = coordinator, world, reshapes, on_lost
        self._topology, self._workers = topology, topology.workers
        self._noticed: set[int] = set()

    @property
    def finished(self) -> bool:
        """True if the coordinator has finished."""
        return self._coordinator.finished

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The coordinator's answer."""
        out = self._losses(now_s) + self._coordinator.receive(now_s, source, message)
        return out + self._reshapes.look(now_s)

    def tick(self, now_s: float) -> Outbox:
        """Take losses, and let the coordinator tick."""
        return self._losses(now_s) + self._coordinator.tick(now_s) + self._reshapes.look(now_s)

    def wait_s(self, now_s: float) -> float:
        """The coordinator's wait, at most until the next death is known."""
        if not self._world.lost:
            return self._coordinator.wait_s(now_s)
        due = (s + self._world.cluster.detection_s for rank, s in self._dead())
        return max(0.0, min([self._coordinator.wait_s(now_s), *(at_s - now_s for at_s in due)]))

    def flops(self, message: Message) -> float:
        """The coordinator's work is free."""
        return 0.0

    def _dead(self) -> list[tuple[int, float]]:
        return [(rank, s) for rank, s in self._world.lost.items() if rank not in self._noticed]

    def _losses(self, now_s: float) -> Outbox:
        out: Outbox = []
        if not self._world.lost:
            return out
        for rank, dead_s in self._dead():
            if now_s >= dead_s + self._world.cluster.detection_s:
                if self._topology.stages > 1 and rank in self._workers:
                    raise PolytempoError(self._lost_stage(rank, dead_s))
                self._noticed.add(rank)
                out += self._coordinator.lose(now_s, rank)
                self._on_lost(rank, dead_s)
        if self._noticed.issuperset(self._workers):
            raise PolytempoError("every worker is lost, so the run cannot go on; let fewer of them crash")
        return out

    def _lost_stage(self, worker: int, dead_s: float) -> str:
        stage, replica = self._topology.stage_of(worker), self._topology.replica_of(worker)
        return (
            f"worker {worker}, which held stage {stage} of the model that workers {', '.join(map(str, replica))} held "
            f"together, is lost since {dead_s:g} s, and a simulation starts no worker again; let workers of a model "
            "without stages crash, or try it with pt.run"
        )


def _timing(step_s: float) -> Timing:
    return Timing(
        retry_s=_RETRY_STEPS * step_s,
        longest_retry_s=_RETRY_STEPS * step_s,
        beat_s=_BEAT_STEPS * step_s,
        lost_s=_LOST_STEPS * step_s,
        worker_lost_s=_LOST_STEPS * step_s,
        deadline_s=_DEADLINE_STEPS * step_s,
        starting_s=_LOST_STEPS * step_s,
    )


def _step_s(model: nn.Module, cost: StepCost, spec: RunSpec, cluster: Cluster) -> float:
    """The approximate seconds of a step: its computation, and all workers' messages to one server and back.

    With servers of a speed of their own, also the time of one server for all workers' pushes.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    network, workers, samples = cluster.network, spec.workers, spec.batch_size
    computing_s = cluster.computing_s(samples * cost.flops_per_sample, cost.gradients(spec.passes(samples)))
    if cluster.server_flops_per_s is not None or cluster.speeds is not None:
        serving = (KernelUse("serve", 1, num_bytes, 4.0 * numel),)
        computing_s += workers * cluster.computing_s(4.0 * numel, serving, server=True)
    return computing_s + 4 * network.latency_s + 2 * workers * num_bytes / network.bytes_per_s
