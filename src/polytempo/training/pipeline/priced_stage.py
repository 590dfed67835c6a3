"""`PricedStage`: a stage of a pipeline that takes its time and sends its messages, and computes nothing.

RunSpec ──▶ real model, once ──▶ Cut, layouts, operations ──▶ the same Cut on the meta device, which all ranks share
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polytempo.core import Port, Strategy
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.facts import steps_late
from polytempo.training.model.ports import ports_of
from polytempo.training.pipeline.late.estimators import estimators_of
from polytempo.training.pipeline.mail.loss_mail import LossMail
from polytempo.training.pipeline.pipeline_stage import UPDATE_FLOPS, schedule_of, shares_of, stage_report
from polytempo.training.pipeline.priced_work import PricedWork
from polytempo.training.pipeline.shared_gradients import SharedGradients
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.training.step.replica import Replica


class PricedStage:
    """The stage that rank `port.rank` has of `parts`, on the meta device. `model` and `optimizer` are that stage's.

    `batch` is every step's. Time and messages are those of `PipelineStage`.
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
        """What is under way comes back."""
        for _ in range(steps_late(self._schedule)):
            await self._program.step(self._ports.model, [])
        await self._program.settle()
        await self._losses.rest()
        await self.replica.settle()

    def report(self) -> dict[str, Any]:
        """As that of a stage which computes."""
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
    """The same cut, with parameters and buffers that have sizes only; what several stages share stays shared."""
    known: dict[int, Any] = {}
    for part in parts.stages:
        for parameter in part.module.parameters():
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            known.setdefault(id(parameter), meta)
        for buffer in part.module.buffers():
            known.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return deepcopy(parts, known)
