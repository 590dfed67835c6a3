"""`ServedStages`: the stages of a training with parameter servers, and the parameters of each.

whole model ──▶ Cut ──▶ own[k]: the parameters of stage k      ──▶ shards S·k … S·k + S - 1 hold them, S of each stage
                                                                 and its workers push to these alone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core import Port
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.facts import steps_late
from polytempo.server.layout import Parameter
from polytempo.server.service import check_service
from polytempo.spec.job import Data
from polytempo.spec.job_calls import optimizer_of
from polytempo.spec.objective import pair_loss, pair_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.running_statistics import Running
from polytempo.training.parts.staged_training import cut_of, first_batch
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.pipeline_stage import schedule_of
from polytempo.training.pipeline.priced_stage import on_meta
from polytempo.training.pipeline.served_stage import ServedStage, StagedTraining
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import MicroBatch
from polytempo.training.served.server_plan import PlannedStage
from polytempo.training.served.shard_rule import parameters_of

_MOST_MESSAGES = 200
"""The most messages on their way from one process to another: a mailbox drops messages beyond 256."""


@dataclass(frozen=True, eq=False)
class CutFacts:
    """The stages of a model as shards and the launcher know them."""

    begins: tuple[str, ...]
    """Names where stages but the first begin: `cut(…, by=begins)` makes the same cut."""
    planned: tuple[PlannedStage, ...]
    """The stages for a `ServerPlan`."""
    running: Tensor | None
    """The running statistics of all stages, one after the other, float64; None where the model has none."""
    running_places: tuple[tuple[int, int, int], ...]
    """The first shard with each buffer of the model's norms, and its range in the shard's vector."""
    most_bytes: int
    """The most bytes of a tensor that passes from stage to stage, for a whole batch."""

    def running_of(self, parts: Mapping[int, Tensor | None]) -> Tensor | None:
        """The whole model's running statistics, from the first shard of each stage."""
        held = {shard: vector for shard, vector in parts.items() if vector is not None}
        found = [held[shard][begin:end] for shard, begin, end in self.running_places]
        return torch.cat(found) if found else None

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return vars(self) | {"running": None if self.running is None else self.running.tolist()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CutFacts:
        """The facts of `to_plain`."""
        running = plain["running"]
        return cls(
            begins=tuple(plain["begins"]),
            planned=tuple(PlannedStage(tuple(names), size) for names, size in plain["planned"]),
            running=None if running is None else torch.tensor(running, dtype=torch.float64),
            running_places=tuple((shard, begin, end) for shard, begin, end in plain["running_places"]),
            most_bytes=plain["most_bytes"],
        )


class ServedStages:
    """The stages of `model` by `cut`, with the trained `parameters`, in so many `shards` in all.

    The model is kept, and copied for each worker; without values (`training.priced`) all workers have the same.

    Errors: ValueError for weights that several stages use, for sparse embeddings, for parameter groups that differ from
    stage to stage, for more messages at a time than a mailbox takes, and for norms with statistics out of reach.
    """

    def __init__(
        self, training: StagedTraining, model: nn.Module, cut: Cut, parameters: tuple[Parameter, ...], shards: int
    ) -> None:
        self._training, self._schedule = training, schedule_of(training.strategy)
        self._check(cut, parameters)
        self._with_values = cut
        self._priced: list[MicroBatch] | None = None
        self._whole = model, cut
        self._places = self._running_places(model)
        if training.priced is not None:
            self._whole = model, on_meta(cut)
        self.own = tuple(self._own(stage, parameters) for stage in range(self._schedule.stages))
        """The parameters of each stage, in the order of its model."""
        self._shards_of_each = shards // self._schedule.stages
        self._running = [Running(self._model(stage)).vector() for stage in range(self._schedule.stages)]

    def stage(self, stages: Port, flops_per_sample: float) -> ServedStage:
        """The stage at position `stages.rank` of a replica, in memory of its own."""
        training = self._training
        if training.priced is None:
            return ServedStage(training, *deepcopy(self._whole), self.own, stages, flops_per_sample)
        if self._priced is None:
            batches = MicroBatches(self._with_values, self._schedule, training.loss, 0, 0, flops_per_sample)
            self._priced = batches.of(*training.pair(training.priced), 0)
        return ServedStage(training, *self._whole, self.own, stages, flops_per_sample, self._priced)

    @cached_property
    def facts(self) -> CutFacts:
        """The stages as shards and the launcher know them."""
        vectors = [vector for vector in self._running if vector is not None]
        sizes = [0 if vector is None else vector.numel() for vector in self._running]
        return CutFacts(
            begins=self._with_values.begins,
            planned=tuple(
                PlannedStage(tuple(each.name for each in own), size) for own, size in zip(self.own, sizes, strict=True)
            ),
            running=torch.cat(vectors) if vectors else None,
            running_places=tuple((stage * self._shards_of_each, begin, end) for stage, begin, end in self._places),
            most_bytes=max(cost.bytes_out for cost in self._with_values.costs),
        )

    def _running_places(self, model: nn.Module) -> list[tuple[int, int, int]]:
        """The stage of each buffer of the model's norms, and its range in the stage's vector."""
        known: dict[int, tuple[int, int, int]] = {}
        for stage in range(self._schedule.stages):
            at = 0
            for buffer in Running(self._model(stage)).buffers:
                known[id(buffer)] = stage, at, at + buffer.numel()
                at += buffer.numel()
        buffers = Running(model).buffers
        if any(id(buffer) not in known for buffer in buffers):
            raise ValueError(
                f"{self._training.who}: the model is cut by torch.export, which replaces its norms, so their running "
                "statistics do not reach a parameter server; use GroupNorm or LayerNorm, or an inner strategy without "
                "a server"
            )
        return [known[id(buffer)] for buffer in buffers]

    def _model(self, stage: int) -> StageModel:
        return StageModel(self._whole[1].stages[stage :: self._schedule.stages])

    def _own(self, stage: int, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        strategy, model = self._training.strategy, self._model(stage)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"stage {stage} of {strategy} has no trained parameters; use fewer stages")
        found = parameters_of(model, self._training.optimizer(model), strategy)
        known = {each.name: each for each in parameters}
        for each in found:
            if known.get(each.name) != each:
                raise ValueError(
                    f"the optimizer of stage {stage} has {each.name} in parameter group {each.group}, and the "
                    "optimizer of the whole model has it elsewhere; a parameter server knows learning rates by the "
                    "number of their group, so let the optimizer have the same groups for the parameters of each stage"
                )
        return found

    def _check(self, cut: Cut, parameters: tuple[Parameter, ...]) -> None:
        strategy, stages = self._training.strategy, self._schedule.stages
        for name, users in cut.shared.items():
            if len({part % stages for part in users}) > 1:
                raise ValueError(
                    f"parameter {name} is used by several stages of {strategy}, and each stage has a parameter server "
                    "of its own; use one_f_one_b with an inner strategy without a server, which sums the gradients, or "
                    "fewer stages"
                )
        if tables := [each.name for each in parameters if each.row_width]:
            raise ValueError(
                f"{', '.join(tables)} travel by their touched rows, and stages push whole vectors; make the embeddings "
                "with sparse=False"
            )
        lanes = Counter[tuple[int, int]]()
        for value in cut.values:
            for target in value.targets:
                lanes[value.source % stages, target % stages] += 1
                lanes[target % stages, value.source % stages] += value.requires_grad
        under_way = self._schedule.micro_batches * (1 + steps_late(self._schedule))
        most = max((n for (a, b), n in lanes.items() if a != b), default=0) * under_way
        if most > _MOST_MESSAGES:
            raise ValueError(
                f"{strategy} may have {most} tensors on their way from one stage to another, and their mailboxes take "
                f"{_MOST_MESSAGES} at a time; use fewer micro_batches or stages"
            )


def stages_of_job(
    spec: RunSpec,
    model: nn.Module,
    data: Data,
    parameters: tuple[Parameter, ...],
    *,
    meta: bool,
    begins: Sequence[str] | None = None,
) -> ServedStages:
    """The stages of a run, made from its `RunSpec`. `model` has values, also with `meta`.

    `begins`: the names that stages begin at, of a cut that another process has made.

    Errors: ValueError as of `ServedStages` and `check_staged`.
    """
    service, job = spec.strategy.server, spec.job
    assert service is not None
    check_staged(spec)

    def pair(batch: Any) -> tuple[tuple[Any, ...], Any]:
        inputs, target = pair_of(job, batch)
        return (inputs,), target

    training = StagedTraining(
        strategy=spec.strategy,
        optimizer=partial(optimizer_of, job, lr=spec.lr),
        loss=pair_loss(job),
        pair=pair,
        seed=spec.seed,
        who=f"job {job.name}",
        priced=first_batch(job, data, spec.batch_size, spec.seed) if meta else None,
    )
    return ServedStages(training, model, cut_of(spec, model, data, begins), parameters, service.shards)


def check_staged(spec: RunSpec) -> None:
    """ValueError for options that a run with stages and parameter servers cannot have."""
    assert spec.strategy.server is not None
    check_service(spec.strategy.server)
    if spec.options.reshape:
        raise ValueError(
            f"{spec.strategy} has a parameter server for each stage, with a fixed number of shards; leave out reshape"
        )
