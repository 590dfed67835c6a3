"""`PricedStage`: a stage of a pipeline that takes its time and sends its messages, and computes nothing.

RunSpec ──▶ real model, once ──▶ Cut, layouts, operations ──▶ the same Cut on the meta device, which all ranks share
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Strategy
from polytempo.partition.cut import Cut, Stage
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import steps_late
from polytempo.training.model.ports import ports_of
from polytempo.training.pipeline.late.estimators import estimators_of
from polytempo.training.pipeline.late.parameter_versions import ParameterVersions
from polytempo.training.pipeline.mail.step_reports import LossMail
from polytempo.training.pipeline.pipeline_stage import UPDATE_FLOPS, schedule_of, shares_of, stage_report
from polytempo.training.pipeline.shared_gradients import SharedGradients
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.training.pipeline.stage_work import LayoutsOf, UnderWay, splits
from polytempo.training.step.replica import Replica


class PricedStage:
    """The stage that rank `port.rank` has of `parts`, on the meta device. `model` and `optimizer` are that stage's.

    `batch` is every step's. Time and messages are the same as of `PipelineStage`.
    """

    def __init__(
        self,
        parts: Cut,
        model: StageModel,
        optimizer: Optimizer,
        strategy: Strategy,
        port: Port,
        batch: list[MicroBatch],
    ) -> None:
        self._parts, self._model, self._batch = parts, model, batch
        self._schedule, self._ports = schedule_of(strategy), ports_of(port)
        self.number = self._ports.model.rank
        self.replica = Replica(model, optimizer, strategy, self._ports.data.size)
        self._shared = SharedGradients(parts, self._schedule, self.number)
        estimators = estimators_of(self._schedule, self.number, 0, self._ports.data)
        self._program = StageProgram(
            parts, self._schedule, self.number, self._update, shares_of(parts), estimators=estimators, work=PricedWork
        )
        self._losses = LossMail(steps_late(self._schedule))

    async def step(self) -> None:
        """Take a batch."""
        loss = await self._program.step(self._ports.model, self._batch)
        await self._losses.step(self._ports.model, loss)

    async def finish(self) -> None:
        """Empty the pipeline."""
        for _ in range(steps_late(self._schedule)):
            await self._program.step(self._ports.model, [])
        await self._program.settle()
        await self._losses.rest()
        await self.replica.settle()

    def report(self) -> dict[str, Any]:
        """The report of `PipelineStage`."""
        return stage_report(self._program, self._parts, self._schedule, self.number, self._model)

    async def _update(self) -> None:
        replica, ports = self.replica, self._ports
        for bucket in replica.buckets:
            await replica.exchange(ports.data, bucket)
        await self._shared.summed(ports.model)
        numel = sum(parameter.numel() for parameter in replica.trainable.values())
        await ports.whole.compute(lambda: None, UPDATE_FLOPS * numel, "update")
        await replica.finish_step(ports.data)


def on_meta(parts: Cut) -> Cut:
    """The same cut, with parameters and buffers that have sizes only; shared parameters stay shared."""
    known: dict[int, Any] = {}
    for part in parts.stages:
        for parameter in part.module.parameters():
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            known.setdefault(id(parameter), meta)
        for buffer in part.module.buffers():
            known.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return deepcopy(parts, known)


class PricedWork:
    """One part. `layouts`: of every tensor that crosses a cut, by micro-batch."""

    def __init__(self, part: Stage, versions: ParameterVersions, schedule: Schedule, layouts: LayoutsOf) -> None:
        self._part, self._versions, self._layouts = part, versions, layouts
        self._splits = splits(schedule, part)
        self._trained = [parameter for parameter in part.module.parameters() if parameter.requires_grad]
        self.under_way: dict[int, UnderWay] = {}
        self.last_version = 0

    def forward(self, number: int, kept: UnderWay) -> tuple[list[Tensor], Tensor | None]:
        """Outputs of a micro-batch with sizes only; a loss is 0."""
        self._versions.begun(kept.version)
        self.under_way[number] = UnderWay((), [], kept.version, kept.seeded)
        layouts = self._layouts(number)
        given = [torch.empty(layouts[n][0], dtype=layouts[n][1], device="meta") for n in self._part.gives]
        return given, None if kept.head is None else torch.zeros(())

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """No gradient of the inputs; parameters get gradients with sizes only."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if not self._splits:
            self._done(number)
        return [None] * len(self._part.takes)

    def weight_gradients(self, number: int) -> None:
        """End the backward pass: the gradients are there already."""
        self._done(number)

    def resume(self, number: int, kept: UnderWay) -> None:
        """A run that is only priced saves nothing."""
        raise AssertionError("a run that is only priced is not resumed")

    def _done(self, number: int) -> None:
        self.last_version = self.under_way.pop(number).version
        self._versions.done(self.last_version)
