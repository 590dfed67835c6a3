"""`ServedStage`: one process's stage of a replica whose parameters are at parameter servers, a server for each stage.

ticket ──▶ micro-batches ──▶ StageProgram ──▶ `.grad` of this stage's parameters ──▶ its worker pushes and pulls
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core import Port
from polytempo.partition.cut import Cut
from polytempo.server.layout import Parameter
from polytempo.spec.job_calls import optimizer_of
from polytempo.spec.objective import loss_of_pair, pair_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.pipeline.loss_mail import LossMail
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.pipeline_stage import schedule_of, shares_of, stage_report
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import StageProgram

_CHANNEL = 970


class ServedStage:
    """The stage of `model`, cut as `parts` says, that position `stages.rank` of the replica's processes has.

    `own`: each stage's trained parameters, in the order in which its workers push them. The schedule must be one whose
    batches are done when a step is over.
    """

    def __init__(
        self,
        spec: RunSpec,
        model: nn.Module,
        parts: Cut,
        own: Sequence[Sequence[Parameter]],
        stages: Port,
        flops_per_sample: float = 0.0,
    ) -> None:
        schedule = self._schedule = schedule_of(spec.strategy)
        self.whole = model
        """The whole model; `collected` makes the first stage's that of all stages."""
        self.number, self._parts, self._own, self._job, self._port = stages.rank, parts, own, spec.job, stages
        self.model = StageModel(parts.stages[self.number :: schedule.stages])
        self.optimizer = optimizer_of(spec.job, self.model, lr=spec.lr)
        self.program = StageProgram(parts, schedule, self.number, _pushed_later, shares_of(parts))
        loss = partial(loss_of_pair, spec.job)
        self._batches = MicroBatches(parts, schedule, loss, spec.seed, 0, flops_per_sample)
        self._losses = LossMail(0)

    async def gradients(self, batch: Any, ticket: int) -> Tensor | None:
        """Take a batch forward and back: leaves `.grad` on this stage's parameters. The first stage answers the loss.

        Dropout draws by the ticket's number, so a batch that is dealt again is computed alike.
        """
        inputs, target = pair_of(self._job, batch)
        loss = await self.program.step(self._port, self._batches.of((inputs,), target, ticket))
        return await self._losses.step(self._port, loss)

    async def collected(self) -> None:
        """The first stage gets the other stages' trained parameters as they are now. Cost: one message of each."""
        port = self._port.on_channel(_CHANNEL)
        values = {name: parameter.detach() for name, parameter in self.whole.named_parameters()}
        if port.rank:
            own = [values[each.name].reshape(-1) for each in self._own[port.rank]]
            await port.send(torch.cat(own), 0)
            return
        for stage in range(1, port.size):
            theirs = [values[each.name] for each in self._own[stage]]
            like = torch.empty(sum(each.numel for each in self._own[stage]), dtype=theirs[0].dtype)
            flat = await port.recv(like, stage)
            for parameter, found in zip(theirs, flat.split([p.numel() for p in theirs]), strict=True):
                parameter.copy_(found.view_as(parameter))

    def report(self) -> dict[str, Any]:
        """What this stage did, as plain values; see `Result.stages`."""
        return stage_report(self.program, self._parts, self._schedule, self.number, self.model)


async def _pushed_later() -> None:
    """The gradients of a batch stay where they are: the worker pushes them when the step is over."""
