"""`ServedProgram`: what a run with a parameter server is made of, worked out from its `RunSpec` alone.

RunSpec ──▶ data, batches, parameters, spans ──▶ context + client      of a worker
                                              ├─▶ shard                of a copy
                                              ├─▶ scheduler, coordinator, tally
                                              └─▶ scorer               of the evaluator

It is the same in every process of the run, in both worlds, and in a replay: they differ in where machines live, and in
what becomes of one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polytempo.core import Port
from polytempo.core.rule import Service
from polytempo.data.batches import Batches
from polytempo.data.plan import check_enough
from polytempo.runs.served.served_stages import ServedStages, stages_of_job
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.layout import Spans, part, shard_map
from polytempo.server.pieces import without_tables
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.score_snapshots import MOST as SNAPSHOTS
from polytempo.server.snapshots.score_snapshots import ScorePoints, score_points
from polytempo.server.tensors.buffers import Empty, plain_empty, without_values
from polytempo.server.tensors.running_statistics import of_first
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.host.lent_gradients import LentGradients
from polytempo.server.worker.vector_format import VectorFormat
from polytempo.spec.job import Data
from polytempo.spec.job_calls import data_of, made_schedule, replica_of
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.topology import Topology
from polytempo.training.job.goals import check_goals
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.model.running_statistics import Running
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.precision.masters import bytes_of, masters_of
from polytempo.training.served.part_noise import PartNoise
from polytempo.training.served.rate_schedule import RateSchedule, check_schedule
from polytempo.training.served.scorer import Scorer
from polytempo.training.served.served_context import ServedContext
from polytempo.training.served.served_replica import trained_of
from polytempo.training.served.server_worker import gradients_of, gradients_without_values
from polytempo.training.served.shard_rule import flat_of, parameters_of, shard_rule_of
from polytempo.training.step.guard import Guard
from polytempo.training.step.step_cost import StepCost

_FREE = StepCost(0.0)
"""Of a worker that is no virtual one."""
_MOST_HELD = 1024
"""A worker asks for one ticket at a time, so it holds as many as its strategy pushes together, and one or two more."""
_SPARE_BUFFERS = 12
"""So many vectors as large as the parameters fit into an arena, beside one for each worker."""
_SPARE_BYTES = 64 << 20
_SLOWLY_BYTES_PER_S = 100e6
"""A copy is not thought dead for touching its parameters at this rate."""


class ServedProgram:
    """Everything that is the same for all nodes. `topology` None: the run's own, on one host.

    `see(model, data)` is called before anything is built on them; it may refuse them. With `meta` tensors have no
    values: nothing is read, computed or scored. Errors: ValueError where the shards cannot do what the job's optimizer
    and schedule say.
    """

    def __init__(
        self,
        spec: RunSpec,
        topology: Topology | None = None,
        see: Callable[[nn.Module, Data], None] = lambda model, data: None,
        *,
        meta: bool = False,
    ) -> None:
        service, options = spec.strategy.server, spec.options
        assert service is not None, f"{spec.strategy} has no parameter server"
        self.spec = spec
        self.topology = topology or spec.topology()
        self.data = data_of(spec.job, options.data)
        self.batches = Batches(
            self.data.training(),
            size=spec.replicas,
            batch_size=spec.batch_size,
            seed=spec.seed,
            deals=service.deals,
        )
        model, optimizer = replica_of(spec)
        see(model, self.data)
        with_values = model
        self._without_values: tuple[nn.Module, Optimizer] | None = None
        """The one model of all workers, where it has no values."""
        if meta:
            with torch.device("meta"):
                self._without_values = model, optimizer = replica_of(spec)
        self.parameters = parameters_of(model, optimizer, spec.strategy)
        if meta and (tables := [each.name for each in self.parameters if each.row_width]):
            raise ValueError(
                f"the rows of {', '.join(tables)} that travel depend on values; make the embeddings with sparse=False, "
                "or leave out meta"
            )
        self.stages: ServedStages | None = None
        """Which stage has which parameters; None: every worker has all."""
        if spec.strategy.schedule is None:
            self.spans = shard_map(self.parameters, service.shards)
        else:
            self.stages = stages_of_job(spec, with_values, self.data, self.parameters, meta=meta)
            self.spans = self.stages.spans
        self.weights, self.running = flat_of(model, optimizer), Running(model).vector()
        self.precision = _precision_facts(spec, model)
        """What results say of 16-bit parameters."""
        self.service = self._service(service, optimizer)
        busy_s = self.weights.nbytes / _SLOWLY_BYTES_PER_S  # a copy says nothing while it applies an update
        self.timing = Timing(deadline_s=options.timeout_s).of_processes(busy_s)
        """How long processes wait for each other; a virtual world and a replay have timings of their own."""

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return self.weights.dtype

    @property
    def scores(self) -> bool:
        """Whether there is a test set to score on."""
        return self.data.test is not None and self._without_values is None

    def scheduler(self) -> BatchScheduler:
        """Deals as many batches as `workers` synchronous workers would take: `steps` counts a batch of each as one."""
        check_goals(self.spec.job, self.spec.options, has_test=self.scores)
        service, batches = self.service, self.batches
        if service.reassigns is not None:  # every worker cuts a share of every step into slices
            check_enough(batches.num_samples, batches.size)
        return BatchScheduler(
            batches_per_epoch=len(batches),
            num_tickets=self._num_tickets,
            deals=service.deals,
            workers=batches.size,
            warm_start=service.warm_start,
            most_held=_MOST_HELD,
            rests=service.waits,
        )

    @property
    def points(self) -> ScorePoints:
        """When scores are taken."""
        return score_points(len(self.batches), self._num_tickets, self.batches.size)

    @property
    def most_lives(self) -> int:
        """How many processes the run may have in all, with those that take another one's place."""
        return self.topology.num_nodes + self.topology.stages * self.spec.options.restarts + 1

    @property
    def hosts(self) -> list[int]:
        """The host of each node, with those that are started later."""
        return [self.topology.host_of(node) for node in range(self.most_lives)]

    @property
    def mail_bytes(self) -> int:
        """The largest tensors that any message carries, in all."""
        passed_on = 0 if self.stages is None else self.stages.most_bytes
        return max(passed_on, (2 * self.spec.workers + 8) * self.weights.nbytes)

    @property
    def arena_bytes(self) -> int:
        """The address space that one process needs for tensors that others read in place."""
        dense_bytes = sum(each.numel for each in without_tables(self.parameters)) * self.dtype.itemsize
        return (self.spec.workers + _SPARE_BUFFERS + SNAPSHOTS) * dense_bytes + _SPARE_BYTES

    def client(
        self,
        worker: int,
        incarnation: int,
        timing: Timing,
        chains: Sequence[Sequence[int]] | None = None,
        memory: LentGradients | None = None,
        peers: Sequence[int] = (),
    ) -> Client:
        """The side of the server of the process on node `worker`.

        The stages of a replica all have the first one's number, and each asks its own shards. `chains`: where the
        shards' copies are by now, if not where they began.

        `peers`: see `peers_of`; a replay leaves them out, for its records say which gradients were summed.
        """
        parameters, spans = self.parameters, self.spans
        if self.stages is not None:
            stage = self.topology.stage_of(worker)
            parameters, spans = self.stages.own[stage], self.stages.local(stage)
        return Client(
            self.topology.replica_of(worker)[0],
            incarnation,
            spans,
            self.topology.chains if chains is None else chains[: len(self.spans)],  # the first view tells of newer ones
            self.topology.coordinator,
            timing,
            VectorFormat(self.dtype, parameters, self.service.codec, self.service.pull_codec),
            memory=memory if self._without_values is None else LentGradients(without_values, lambda tensor: True),
            peers=peers,
        )

    def peers_of(self, worker: int) -> Sequence[int]:
        """The workers of its host, where these sum their gradients before they push; () elsewhere."""
        if not self.service.hierarchical:
            return ()
        host_of = self.topology.host_of
        return [other for other in self.topology.workers if host_of(other) == host_of(worker)]

    def first_worker(self, shard: int) -> int:
        """The node of the first worker that a shard serves; the others follow it."""
        if self.stages is None:  # every shard serves all, also one that comes later
            return 0
        return shard * self.topology.stages // len(self.spans) * len(self.topology.firsts)

    def context(self, cost: StepCost = _FREE, stages: Port | None = None) -> ServedContext:
        """What a worker is to train; a virtual one charges `cost`. `stages`: its replica's processes."""
        spec, batches, stage = self.spec, self.batches, None
        meta = self._without_values is not None
        if self.stages is None:
            model, optimizer = self._without_values or replica_of(spec)
        else:
            assert stages is not None
            stage = self.stages.stage(stages, cost.flops_per_sample)
            model, optimizer = stage.model, stage.optimizer
        decay = LocalDecay(optimizer) if self.service.decays == "workers" else None
        schedule = None
        if (make := made_schedule(spec.job)) is not None:
            movable = _movable(spec.strategy.server)
            schedule = RateSchedule(
                *(optimizer, make), steps_per_epoch=self._steps_per_epoch, batches=len(batches), movable=movable
            )
        every = spec.options.noise_scale
        return ServedContext(
            job=spec.job,
            strategy=spec.strategy,
            model=model,
            optimizer=optimizer,
            data=self.data,
            batches=batches,
            compute_gradients=gradients_without_values(cost) if meta else gradients_of(model, spec.job, cost),
            reads=not meta,
            seed=spec.seed,
            schedule=schedule,
            decay=decay,
            guard=None if spec.options.allow_nan or meta else Guard(model, trainable(model, optimizer)),
            noise=None if every is None else PartNoise(spec.job, model, trainable(model, optimizer), every=every),
            masters=None if meta else masters_of(model, optimizer, spec.options.precision),
            stage=stage,
            trained=trained_of(model, optimizer, spec.strategy, self.parameters) if meta and stage is None else None,
        )

    def shard(
        self,
        number: int,
        spans: Sequence[Spans] | None = None,
        *,
        native: bool | None = None,
        empty: Empty | None = None,
    ) -> Shard:
        """Shard `number` as the run begins. `spans`: what each shard holds by now; one that it lacks holds nothing."""
        present = self.spans if spans is None else spans
        held = present[number] if number < len(present) else ()
        return Shard(
            number,
            self.parameters,
            held,
            part(self.weights, held).clone(),
            self.service,
            empty=empty or (plain_empty if self._without_values is None else without_values),
            native=native,
            running=self.running if self.stages is None else self.stages.running(number),
        )

    def running_of(self, parts: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
        """The whole model's running statistics, of those that each shard has."""
        return of_first(parts) if self.stages is None else self.stages.running_of(parts)

    def scorer(self) -> Scorer:
        """Scores what the shards hold, with a model of its own."""
        return Scorer(self.spec.job, self.data, self.batches, *replica_of(self.spec), self.spec.options.precision)

    @property
    def _num_tickets(self) -> int:
        """How many batches the run has, to the end of its steps or its epochs, whichever comes first."""
        batches, steps, epochs = self.batches, self.spec.options.steps, self.spec.epochs
        by_steps = None if steps is None else steps * batches.size
        if epochs is None:
            assert by_steps is not None
            return by_steps
        unit = 1 if batches.deals == "freely" else batches.size
        by_epochs = max(1, -int(-epochs * (len(batches) // unit) // 1)) * unit
        return by_epochs if by_steps is None else min(by_steps, by_epochs)

    @property
    def _steps_per_epoch(self) -> int:
        """The steps of an epoch for the learning-rate schedule: one worker's part of the batches."""
        return max(1, len(self.batches) // self.batches.size)

    def _service(self, service: Service, optimizer: Optimizer) -> Service:
        """`service` with the optimizer that its shards apply. `optimizer`, the job's, is given away."""
        if service.hierarchical and (tables := [each.name for each in self.parameters if each.row_width]):
            raise ValueError(
                f"{self.spec.strategy} sums whole gradients within a host, and {', '.join(tables)} travel by "
                "their touched rows; leave out hierarchical, or make the embeddings with sparse=False"
            )
        allow_nan = self.spec.options.allow_nan or self._without_values is not None
        made = replace(service, optimizer=shard_rule_of(service, optimizer), allow_nan=allow_nan)
        if (schedule := made_schedule(self.spec.job)) is not None:
            check_schedule(optimizer, schedule, self._steps_per_epoch, _movable(service))
        return made


def _precision_facts(spec: RunSpec, model: nn.Module) -> dict[str, Any] | None:
    """What a result says of workers that compute in 16 bits; None where they do not."""
    precision, service = spec.options.precision, spec.strategy.server
    if precision is None or service is None:
        return None
    carried = {"pushes": service.codec, "pulls": service.pull_codec}
    names = {what: "float32" if codec is None else codec.facts.name for what, codec in carried.items()}
    return {"dtype": str(precision)} | bytes_of(model) | {"loss_scale": 1.0, "skipped_steps": 0} | names


def _movable(service: Service | None) -> Collection[str] | None:
    """What a schedule may move: what the shards need of it travels with each push, or the workers alone need it."""
    assert service is not None
    if service.optimizer is None:
        return ("lr",)
    return ("lr", "momentum", "betas") if service.decays == "workers" else None
