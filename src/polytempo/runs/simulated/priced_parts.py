"""Runs of divided models in the virtual world that compute nothing and take their time.

model on the meta device ──▶ rules, operations, a batch's sizes ──▶ each rank's parts
                                                                     forward and backward: all exchanges are sent
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from polytempo.cluster import Cluster
from polytempo.core import Port
from polytempo.core.port import world_port
from polytempo.core.strategy import InParts
from polytempo.core.suspension import drive
from polytempo.one_host.hogwild import Updates
from polytempo.partition.cut import Cut
from polytempo.partition.hybrid.divided_names import DividedNames
from polytempo.partition.plan import split_plan
from polytempo.partition.tensor.way import SplitLayers
from polytempo.spec.job import Data
from polytempo.spec.job_calls import optimizer_of
from polytempo.spec.objective import pair_loss
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.distillation import objective_of
from polytempo.training.job.start import replica_of
from polytempo.training.model.ports import ports_of
from polytempo.training.model.run_device import beside
from polytempo.training.parts.model_parts import ModelParts
from polytempo.training.parts.parted_training import laid_out_run, parted_model, planned_names
from polytempo.training.parts.staged_training import cut_of, first_batch, sample_of
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.pipeline_stage import laid_out, schedule_of
from polytempo.training.pipeline.priced_stage import PricedStage, on_meta
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import MicroBatch
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost, counted, meta_model
from polytempo.training.virtual.virtual_step import StepWork, charged, step_of_work
from polytempo.worlds import Outcome, VirtualWorld
from polytempo.worlds.virtual.symmetry import run_priced

_WITHOUT_VALUES = re.compile(r"\bmeta\b", re.IGNORECASE)
"""A part of torch's errors about operations that need the values of a tensor on the meta device."""


class PricedParts(NamedTuple):
    """The outcome, and the parts of the first rank."""

    outcome: Outcome[None]
    parts: ModelParts


def priced_parts(
    spec: RunSpec, cluster: Cluster, data: Data, cost: StepCost, steps: int, updates: Callable[[int], Updates]
) -> PricedParts:
    """So many steps of `spec`, each on a batch as large as the first. `updates(rank)`: the updates of a rank.

    Memory: tensors without values; the model once, where a plan has to look at values. Errors: ValueError as of
    `parted_model`, and for a job that cannot be computed without values.
    """
    whole, named = _resolved(spec, data)
    names = [name for name, _ in whole.named_parameters()]
    size = -(-(spec.options.global_batch_size or 0) // spec.replicas) or spec.batch_size
    passes = spec.passes(size)
    batch = beside(whole, first_batch(spec.job, data, passes[0], spec.seed))
    hosts = cluster.hosts(spec.workers)
    assert named.strategy.parted is not None
    each = cost.part(named.strategy.parted.ranks)

    def parts_of(port: Port) -> ModelParts:
        own = parted_model(named, deepcopy(whole), data, port, drive)
        optimizer = optimizer_of(spec.job, own, spec.lr)
        return ModelParts(own, Replica(own, optimizer, spec.strategy, spec.replicas), port, names)

    parts = [parts_of(laid_out_run(world_port(rank, hosts), spec.strategy)) for rank in range(spec.workers)]

    async def program(port: Port) -> None:
        replica, applied = parts[port.rank].replica, updates(port.rank)
        objective = objective_of(spec.job, replica, None)
        work = StepWork(partial(_gradients, spec, objective, batch, len(passes)), lambda: None)
        data_port = ports_of(laid_out_run(port, spec.strategy)).data
        for step in range(steps):
            await port.mark(step)
            await step_of_work(data_port, replica, charged(each, replica, passes, applied.varied(1.0)), work, applied)
        await replica.settle()
        await applied.settle()
        await port.barrier()  # as where it computes: waiting for the slowest is training time

    return PricedParts(run_priced(cluster, spec.workers, program, seed=spec.seed, alike=False), parts[0])


def _resolved(spec: RunSpec, data: Data) -> tuple[nn.Module, RunSpec]:
    """The model on the meta device, and the run as `resolved`."""
    try:
        model = meta_model(spec.job)
        return model, resolved(spec, model, data)
    except (RuntimeError, TypeError, ValueError):
        model, _ = replica_of(spec)
        named = resolved(spec, model, data)
        return model.to("meta"), named


def resolved(spec: RunSpec, model: nn.Module, data: Data) -> RunSpec:
    """The run with the layers that a plan for `model` chooses by name."""
    parted = spec.strategy.parted
    if isinstance(parted, SplitLayers) and isinstance(parted.rules, str):
        sample = beside(model, sample_of(spec.job, data, spec.batch_size, spec.seed))
        plan = split_plan(model, sample, parted.ranks, parted.wires)
        parted = replace(parted, rules=plan.rules)
    elif isinstance(parted, DividedNames) and parted.names is None:
        parted = replace(parted, names=planned_names(spec, model, data))
    assert parted is not None
    return replace(spec, strategy=replace(spec.strategy, layout=InParts(parted)))


def _gradients(spec: RunSpec, objective: Callable[[Any], Tensor], batch: Any, passes: int) -> None:
    try:
        for _ in range(passes):
            objective(batch).backward()
    except (RuntimeError, TypeError) as error:
        if not _WITHOUT_VALUES.search(str(error)):
            raise
        said = str(error).splitlines()[0]
        raise ValueError(
            f"job {spec.job.name} with {spec.strategy} cannot be computed without values ({said}); leave out meta, and "
            "simulate some steps with values"
        ) from error


class PricedStages(NamedTuple):
    """The outcome, and the stage of each rank."""

    outcome: Outcome[None]
    stages: list[PricedStage]


def priced_stages(spec: RunSpec, cluster: Cluster, data: Data, steps: int) -> PricedStages:
    """So many steps of `spec`, each on a batch as large as the first one.

    Memory: tensors without values; the model once, where it cannot be cut without values. Errors: ValueError as of
    `cut_of`.
    """
    job, strategy, schedule = spec.job, spec.strategy, schedule_of(spec.strategy)
    priced, batch = _cut(spec, data)
    models = [StageModel(priced.stages[number :: schedule.stages]) for number in range(schedule.stages)]
    optimizers = [optimizer_of(job, each, lr=spec.lr) for each in models]

    def stage(port: Port) -> PricedStage:
        whole = laid_out(port, schedule.stages)
        number = whole.rank % schedule.stages
        return PricedStage(priced, models[number], optimizers[number], strategy, whole, batch)

    hosts = cluster.hosts(spec.workers)
    stages = [stage(world_port(rank, hosts)) for rank in range(spec.workers)]

    async def program(port: Port) -> Any:
        for step in range(steps):
            await port.mark(step)
            await stages[port.rank].step()
        await stages[port.rank].finish()
        await port.barrier()  # as where it computes: waiting for the slowest is training time

    return PricedStages(VirtualWorld(cluster, spec.workers, seed=spec.seed).run(program), stages)


def _cut(spec: RunSpec, data: Data) -> tuple[Cut, list[MicroBatch]]:
    """The stages on the meta device, and a batch for them."""
    try:
        return _cut_of(spec, meta_model(spec.job), data)
    except (RuntimeError, TypeError, ValueError):
        return _cut_of(spec, replica_of(spec)[0], data)


def _cut_of(spec: RunSpec, model: nn.Module, data: Data) -> tuple[Cut, list[MicroBatch]]:
    job, parts = spec.job, cut_of(spec, model, data)
    size = -(-(spec.options.global_batch_size or 0) // spec.replicas) or spec.batch_size
    inputs, target = first_batch(job, data, size, spec.seed)  # estimators of gradients look at targets
    flops = counted(job, model, data, spec.seed).flops_per_sample
    batches = MicroBatches(parts, schedule_of(spec.strategy), pair_loss(job), spec.seed, 0, flops)
    return on_meta(parts), batches.of((beside(model, inputs),), target, 0)
