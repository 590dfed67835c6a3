"""`ServedStages`: the stages of a run with parameter servers, worked out from its `RunSpec`: who has which parameters.

whole model ──▶ Cut ──▶ own[k]: the parameters of stage k      ──▶ shards S·k … S·k + S - 1 hold them, S of each stage
                        local[k]: where they lie in its vector       and its workers push to these alone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from polytempo.core import Port
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.facts import steps_late
from polytempo.server.layout import Parameter, Spans
from polytempo.server.service import check_service
from polytempo.server.stage_layout import stage_spans
from polytempo.spec.job import Data
from polytempo.spec.job_calls import optimizer_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.pipeline.pipeline_stage import schedule_of
from polytempo.training.pipeline.served_stage import ServedStage
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.running_statistics import Running
from polytempo.training.shard_rule import parameters_of
from polytempo.training.staged_training import cut_of

_MOST_MESSAGES = 200
"""On their way from one process to another: a mailbox drops what is more than 256."""


class ServedStages:
    """Of `model`, the run's, whose trained parameters are `parameters`, in so many `shards` in all.

    The model is kept, and copied for each worker.

    Errors: ValueError for weights that several stages use, for sparse embeddings, for parameter groups that differ from
    stage to stage, for more messages at a time than a mailbox takes, and for norms whose statistics are out of reach.
    """

    def __init__(
        self, spec: RunSpec, model: nn.Module, data: Data, parameters: tuple[Parameter, ...], shards: int
    ) -> None:
        self._spec, self._schedule = spec, schedule_of(spec.strategy)
        cut = cut_of(spec, model, data)
        self._whole = model, cut
        self._check(cut, parameters)
        self.own = tuple(self._own(stage, parameters) for stage in range(self._schedule.stages))
        """The parameters of each stage, in the order in which its model has them."""
        self.most_bytes = max(cost.bytes_out for cost in cut.costs)
        """Of a tensor that passes from stage to stage: no stage sends more for a whole batch."""

        each = shards // self._schedule.stages
        self._shards = [stage_spans(parameters, own, each) for own in self.own]
        self.spans = tuple(shard.whole for shards in self._shards for shard in shards)
        """Of each shard its ranges of the vector of all parameters."""
        self._running = [Running(self._model(stage)).vector() for stage in range(self._schedule.stages)]
        self._places = self._running_places(model)

    def local(self, stage: int) -> tuple[Spans, ...]:
        """Of every shard what it holds of the stage's own vector: of another stage's shard nothing."""
        found = [(number, shard) for number, shards in enumerate(self._shards) for shard in shards]
        return tuple(shard.own if number == stage else () for number, shard in found)

    def stage(self, stages: Port, flops_per_sample: float) -> ServedStage:
        """That of position `stages.rank` of a replica, in memory of its own."""
        model, cut = deepcopy(self._whole)
        return ServedStage(self._spec, model, cut, self.own, stages, flops_per_sample)

    def running(self, shard: int) -> Tensor | None:
        """The running statistics of norms that a shard begins with: those of its stage."""
        return self._running[shard // len(self._shards[0])]

    def running_of(self, parts: Mapping[int, Tensor | None]) -> Tensor | None:
        """The whole model's, of those that each shard has: of each stage the first shard's count."""
        firsts = [parts[stage * len(self._shards[0])] for stage in range(len(self._shards))]
        held = {stage: vector for stage, vector in enumerate(firsts) if vector is not None}
        found = [held[stage][begin:end] for stage, begin, end in self._places]
        return torch.cat(found) if found else None

    def _running_places(self, model: nn.Module) -> list[tuple[int, int, int]]:
        """For each of the model's buffers of norms its stage, and its range in the vector of that."""
        known: dict[int, tuple[int, int, int]] = {}
        for stage in range(self._schedule.stages):
            at = 0
            for buffer in Running(self._model(stage)).buffers:
                known[id(buffer)] = stage, at, at + buffer.numel()
                at += buffer.numel()
        buffers = Running(model).buffers
        if any(id(buffer) not in known for buffer in buffers):
            raise ValueError(
                f"job {self._spec.job.name}: the model is cut by torch.export, in which its norms are no modules any "
                "more, so their running statistics do not reach a parameter server; use GroupNorm or LayerNorm, or an "
                "inner strategy without a server"
            )
        return [known[id(buffer)] for buffer in buffers]

    def _model(self, stage: int) -> StageModel:
        return StageModel(self._whole[1].stages[stage :: self._schedule.stages])

    def _own(self, stage: int, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        spec, model = self._spec, self._model(stage)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"stage {stage} of {spec.strategy} has no trained parameters; use fewer stages")
        found = parameters_of(model, optimizer_of(spec.job, model, lr=spec.lr), spec.strategy)
        known = {each.name: each for each in parameters}
        for each in found:
            if known.get(each.name) != each:
                raise ValueError(
                    f"the optimizer of stage {stage} has {each.name} in parameter group {each.group}, and that of the "
                    "whole model has it elsewhere; a parameter server knows learning rates by the number of their "
                    "group, so let the job's optimizer have the same groups for the parameters of each stage"
                )
        return found

    def _check(self, cut: Cut, parameters: tuple[Parameter, ...]) -> None:
        strategy, stages = self._spec.strategy, self._schedule.stages
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


def check_staged(spec: RunSpec) -> None:
    """ValueError for what a run with stages and parameter servers cannot have."""
    assert spec.strategy.server is not None
    check_service(spec.strategy.server)
    if spec.options.reshape:
        raise ValueError(
            f"{spec.strategy} has a parameter server for each stage, whose shards stay as they are; leave out reshape"
        )
