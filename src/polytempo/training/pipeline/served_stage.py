"""`ServedStage`: one process's stage of a replica whose parameters are at parameter servers, a server for each stage.

ticket ──▶ micro-batches ──▶ StageProgram ──▶ `.grad` of this stage's parameters ──▶ its worker pushes and pulls

Where the schedule is late the gradient is of an older ticket. What it was computed with is a version of what was pulled
then; the present parameters are as the last pull, or the worker's own step, has left them.

    one_f_one_b    F 5  B 5  push 5, pull
    ddg            F 5  B 4  push 4, pull                  a stage of which gradients are one step late
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import Port, Program
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.facts import steps_late
from polytempo.server.layout import Parameter
from polytempo.server.message import Ticket
from polytempo.spec.job_calls import optimizer_of
from polytempo.spec.objective import loss_of_pair, pair_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.pipeline.estimators import estimators_of
from polytempo.training.pipeline.late_stage import late_stage
from polytempo.training.pipeline.loss_mail import LossMail
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.pipeline_stage import schedule_of, shares_of, stage_report
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import StageProgram

_CHANNEL = 970


class LateGradient(NamedTuple):
    """What is in `.grad` at an update of a stage."""

    ticket: Ticket
    """Its batch."""
    samples: int
    versions: tuple[int, ...]
    """Of each shard the version of the parameters that it was computed with."""


class ServedStage:
    """The stage of `model`, cut as `parts` says, that position `stages.rank` of the replica's processes has.

    `own`: each stage's trained parameters, in the order in which its workers push them. Estimators of gradients are the
    replica's own: they are at no server, and begin anew with it.
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
        self.late = steps_late(schedule)
        """Steps after its own in which a batch's last gradient is back at all stages."""
        parameters = list(self.model.parameters())
        self.program = StageProgram(
            parts,
            schedule,
            self.number,
            self._update,
            shares_of(parts),
            estimators=estimators_of(schedule, self.number, spec.seed),
            late=late_stage(schedule, self.number, parameters, self.optimizer),
        )
        loss = partial(loss_of_pair, spec.job)
        self._batches = MicroBatches(parts, schedule, loss, spec.seed, 0, flops_per_sample)
        self._losses = LossMail(self.late)
        self._entered: deque[tuple[Ticket, int]] = deque()
        """The tickets, with their samples, whose gradients have made no update yet."""
        self._under_way = False
        self._computed_with: dict[int, tuple[int, ...]] = {}
        """The shards' versions that each version of this stage's parameters is of."""

    def serve(self, exchange: Callable[[LateGradient], Program[None]], versions: Callable[[], tuple[int, ...]]) -> None:
        """Before the first step: what happens at an update, and the shards' versions of the present parameters."""
        self._exchange, self._versions = exchange, versions

    async def step(self, batch: Any, ticket: Ticket, samples: int) -> Tensor | None:
        """Take a batch forward, and gradients back as the schedule says. The first stage answers the loss that comes
        back with them.

        Dropout draws by the ticket's number, so a batch that is dealt again is computed alike.
        """
        self._computed_with[self.program.versions.current] = self._versions()
        self._entered.append((ticket, samples))
        self._under_way = True
        inputs, target = pair_of(self._job, batch)
        loss = await self.program.step(self._port, self._batches.of((inputs,), target, ticket.number))
        return await self._losses.step(self._port, loss)

    async def drain(self) -> list[Tensor]:
        """Take all gradients back that are under way, and update by them. The first stage answers their losses."""
        if self._under_way:
            for _ in range(self.late):
                await self.program.step(self._port, [])
        self._under_way = False
        return await self._losses.rest()

    async def _update(self) -> None:
        """The gradients of this stage are there."""
        program, (ticket, samples) = self.program, self._entered.popleft()
        await self._exchange(LateGradient(ticket, samples, self._computed_with[program.last_version]))
        self._computed_with[program.versions.current] = self._versions()
        self._computed_with.pop(program.versions.current - self.late - 2, None)  # no gradient is later

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
