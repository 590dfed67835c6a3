"""`ServedProgram`: the parts of a run with a parameter server, made from its `RunSpec` only.

RunSpec ──▶ data, batches, model ──▶ plan: clients, shards, coordinator      see `ServerPlan`
                                  ├─▶ context                               of a worker
                                  ├─▶ batch scheduler
                                  └─▶ scorer                                of the evaluator

It is the same in every process of the run, in both worlds, and in a replay: they differ in the places of machines, and
in the consequences of a machine's end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polytempo.core import Bundle, Port
from polytempo.core.calls.refusals import refuse
from polytempo.core.rule import Service
from polytempo.core.system.url_path import Place
from polytempo.core.transform import cost_of
from polytempo.data.batches import Batches
from polytempo.data.plan import check_enough
from polytempo.device import HOST
from polytempo.runs.frame.short_fork import gradients_keep_forks, in_fork
from polytempo.runs.served.served_stages import CutFacts, ServedStages, stages_of_job
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.layout import Parameter
from polytempo.server.snapshots.score_snapshots import ScorePoints, score_points
from polytempo.server.tensors.running_statistics import of_first
from polytempo.server.timing import Timing
from polytempo.spec.job import Data
from polytempo.spec.job_calls import data_of, made_schedule
from polytempo.spec.placement import on_hosts
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.topology import Topology
from polytempo.training.job.evaluate import check_goals
from polytempo.training.job.start import replica_of
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.model.run_device import on_device, run_device
from polytempo.training.model.running_statistics import Running
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.precision.masters import bytes_of, masters_of
from polytempo.training.served.part_noise import PartNoise
from polytempo.training.served.rate_schedule import RateSchedule, check_schedule
from polytempo.training.served.scorer import Scorer
from polytempo.training.served.served_context import ServedContext
from polytempo.training.served.served_model import write_served_model
from polytempo.training.served.served_replica import trained_of
from polytempo.training.served.server_plan import ServerPlan, timing_of_processes
from polytempo.training.served.shard_rule import flat_of, parameters_of, shard_rule_of
from polytempo.training.served.worker_program import gradients_of, gradients_without_values
from polytempo.training.step.guard import Guard
from polytempo.training.step.step_cost import StepCost

_FREE = StepCost(0.0)
"""The cost of a worker in a process."""


class ServedProgram:
    """The parts that are the same for all nodes. `topology` None: the run's own, on one host.

    `see(model, data)` is called before anything is built on them. It may refuse them, and returns the waiting times of
    machines; None: the times of processes. With `meta` tensors have no values: nothing is read, computed or scored.
    `forks`: this process forks workers afterwards, so it must compute no gradients where torch sees an accelerator.
    Errors: ValueError if the shards cannot follow the job's optimizer and schedule.
    """

    def __init__(
        self,
        spec: RunSpec,
        topology: Topology | None = None,
        see: Callable[[nn.Module, Data], Timing | None] = lambda model, data: None,
        *,
        meta: bool = False,
        forks: bool = False,
    ) -> None:
        service, options = spec.strategy.server, spec.options
        assert service is not None, f"{spec.strategy} has no parameter server"
        self.spec = spec
        self.data = data_of(spec.job, options.data)
        self.batches = Batches(
            self.data.training(),
            size=spec.replicas,
            batch_size=spec.batch_size,
            seed=spec.seed,
            deals=service.deals,
        )
        model, optimizer = replica_of(spec, HOST)  # the launcher forks, so it must not use a device
        timing = see(model, self.data)
        with_values = model
        self._without_values: tuple[nn.Module, Optimizer] | None = None
        """The one model of all workers, if it has no values."""
        if meta:
            with torch.device("meta"):
                self._without_values = model, optimizer = replica_of(spec)
        parameters = parameters_of(model, optimizer, spec.strategy)
        self._check_tables(parameters, service)
        self.stages: CutFacts | None = None
        """The parameters of each stage; None: every worker has all."""
        self._made: dict[torch.device, ServedStages] = {}
        """The stages in this process's memory, by device, from the first worker on; of all its workers."""
        if spec.strategy.schedule is not None:
            make = partial(stages_of_job, spec, with_values, self.data, parameters, meta=meta)
            if forks and gradients_keep_forks():
                self.stages = CutFacts.from_plain(in_fork(lambda: make().facts.to_plain()))
            else:
                self._made[HOST] = make()
                self.stages = self._made[HOST].facts
        weights, topology = flat_of(model, optimizer), topology or spec.topology()
        self.precision = _precision_facts(spec, model)
        """Facts about 16-bit parameters, for results."""
        self.plan = ServerPlan(
            self._service(service, optimizer),
            topology,
            parameters,
            weights,
            Running(model).vector() if self.stages is None else self.stages.running,
            timing or timing_of_processes(weights, options.timeout_s),
            stages=() if self.stages is None else self.stages.planned,
            passed_bytes=0 if self.stages is None else self.stages.most_bytes,
            spare_lives=topology.stages * options.restarts,
        )
        """The server, and the workers' clients."""

    def place(self, num_hosts: int) -> None:
        """Put the nodes on so many hosts."""
        self.plan = replace(self.plan, topology=on_hosts(self.plan.topology, num_hosts))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all parameters."""
        return self.plan.weights.dtype

    @property
    def scores(self) -> bool:
        """True if there is a test set to score on."""
        return self.data.test is not None and self._without_values is None

    def scheduler(self) -> BatchScheduler:
        """Deals as many batches as `workers` synchronous workers would take: `steps` counts a batch of each as one."""
        check_goals(self.spec.job, self.spec.options, has_test=self.scores, more=self.data.more)
        if self.plan.service.reassigns is not None:  # every worker cuts a share of every step into slices
            check_enough(self.batches.num_samples, self.batches.size)
        self._check_regions()
        return self.plan.scheduler(len(self.batches), self._num_tickets, run=self.batches.run)

    def _check_regions(self) -> None:
        """`Incompatible` for a run that ends before a region gives its movement on."""
        rule, workers = self.plan.service.rule, self.batches.size
        if not rule.region_size:
            return
        strategy, regions = self.spec.strategy, -(-workers // rule.region_size)
        vector = Bundle({"vector": self.plan.weights})
        period = cost_of(strategy.parameters, vector, workers).exchanges[0].steps.period
        pushes, batches = self._num_tickets / (period * regions), period * regions * rule.region_pushes
        if pushes < rule.region_pushes:
            how = {"every": rule.region_pushes, "regions": regions, "pushes": f"{pushes:.3g}", "batches": batches}
            refuse({"regions", "short run"}, strategy=strategy, **how)

    @property
    def points(self) -> ScorePoints:
        """The points of scores."""
        every, workers = self.spec.options.eval_every, self.batches.size
        if every is None:
            return score_points(len(self.batches), self._num_tickets, workers)
        return ScorePoints(every.batches(len(self.batches), workers), self._num_tickets)

    def context(self, cost: StepCost = _FREE, stages: Port | None = None) -> ServedContext:
        """The training of a worker; a virtual worker charges `cost`. `stages`: its replica's processes."""
        spec, stage, meta = self.spec, None, self._without_values is not None
        device = None if meta else run_device(spec.options, spec.strategy)
        spec = spec if device is None else on_device(spec, device)
        batches = self.batches.on(device)
        if self.stages is None:
            model, optimizer = self._without_values or replica_of(spec, device)
        else:
            assert stages is not None
            stage = self._stages_on(device or HOST, spec, self.stages).stage(stages, cost.flops_per_sample)
            model, optimizer = stage.model, stage.optimizer
        decay = LocalDecay(optimizer) if self.plan.service.decays == "workers" else None
        schedule = None
        if (make := made_schedule(spec.job)) is not None:
            movable = _movable(spec.strategy.server)
            schedule = RateSchedule(
                *(optimizer, make), steps_per_epoch=self._steps_per_epoch, batches=len(batches), movable=movable
            )
        every, found = spec.options.noise_scale, self.plan.parameters
        return ServedContext(
            job=spec.job,
            strategy=spec.strategy,
            model=model,
            optimizer=optimizer,
            data=self.data,
            batches=batches,
            compute_gradients=gradients_without_values(spec, cost) if meta else gradients_of(model, spec, cost),
            passes=spec.passes,
            reads=not meta,
            seed=spec.seed,
            schedule=schedule,
            decay=decay,
            guard=None if spec.options.allow_nan or meta else Guard(model, trainable(model, optimizer)),
            noise=None if every is None else PartNoise(spec.job, model, trainable(model, optimizer), every=every),
            masters=None if meta else masters_of(model, optimizer, spec.options.precision),
            clip_norm=spec.options.clip_norm,
            stage=stage,
            out=spec.options.out,
            trained=trained_of(model, optimizer, spec.strategy, found) if meta and stage is None else None,
        )

    def _stages_on(self, device: torch.device, spec: RunSpec, found: CutFacts) -> ServedStages:
        if device not in self._made:
            model, _ = replica_of(spec, device)
            self._made[device] = stages_of_job(
                spec, model, self.data, self.plan.parameters, meta=False, begins=found.begins
            )
        return self._made[device]

    def running_of(self, parts: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
        """The whole model's running statistics, from the statistics of each shard."""
        return of_first(parts) if self.stages is None else self.stages.running_of(parts)

    def scorer(self) -> Scorer:
        """A scorer of the shards' weights, with a model of its own."""
        device = run_device(self.spec.options, self.spec.strategy)
        spec = on_device(self.spec, device)
        found = replica_of(spec, device)
        return Scorer(spec.job, self.data, self.batches, *found, spec.options.precision)

    def leave_model(self, folder: Place) -> None:
        """Leave the names and shapes of the model in `folder`, beside its snapshots (see `served_model`)."""
        write_served_model(
            *(folder, *replica_of(self.spec), self.plan),
            strategy=str(self.spec.strategy),
            workers=self.batches.size,
            running=() if self.stages is None else self.stages.running_places,
        )

    @property
    def _num_tickets(self) -> int:
        """The number of batches to the end of the run's steps or epochs, the earlier of both."""
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

    def _check_tables(self, parameters: Sequence[Parameter], service: Service) -> None:
        """ValueError if touched rows cannot travel alone."""
        if not (tables := [each.name for each in parameters if each.row_width]):
            return
        if self._without_values is not None:
            raise ValueError(
                f"the rows of {', '.join(tables)} that travel depend on values; make the embeddings with sparse=False, "
                "or leave out meta"
            )
        if self.spec.options.ema is not None:
            shown = {"strategy": self.spec.strategy, "ema": self.spec.options.ema, "tables": ", ".join(tables)}
            refuse({"average", "tables"}, **shown)
        if service.hierarchical:
            raise ValueError(
                f"{self.spec.strategy} sums whole gradients within a host, and {', '.join(tables)} travel by "
                "their touched rows; leave out hierarchical, or make the embeddings with sparse=False"
            )

    def _service(self, service: Service, optimizer: Optimizer) -> Service:
        """`service` with the optimizer that its shards apply. The job's `optimizer` must not be used afterwards."""
        allow_nan = self.spec.options.allow_nan or self._without_values is not None
        rule, average = shard_rule_of(service, optimizer), self.spec.options.ema
        made = replace(service, optimizer=rule, allow_nan=allow_nan, average=average)
        if (schedule := made_schedule(self.spec.job)) is not None:
            check_schedule(optimizer, schedule, self._steps_per_epoch, _movable(service))
        return made


def _precision_facts(spec: RunSpec, model: nn.Module) -> dict[str, Any] | None:
    """A result's facts about workers that compute in 16 bits; None for other workers."""
    precision, service = spec.options.precision, spec.strategy.server
    if precision is None or service is None:
        return None
    carried = {"pushes": service.codec, "pulls": service.pull_codec}
    names = {what: "float32" if codec is None else codec.facts.name for what, codec in carried.items()}
    return {"dtype": str(precision)} | bytes_of(model, precision) | {"loss_scale": 1.0, "skipped_steps": 0} | names


def _movable(service: Service | None) -> Collection[str] | None:
    """The settings that a schedule may move: they travel with each push, or only the workers need them."""
    assert service is not None
    if service.optimizer is None:
        return ("lr",)
    return ("lr", "momentum", "betas") if service.decays == "workers" else None
