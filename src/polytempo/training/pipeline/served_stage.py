"""`ServedStage`: one process's stage of a replica with parameters at parameter servers, a server for each stage.

ticket ──▶ micro-batches ──▶ StageProgram ──▶ `.grad` of this stage's parameters ──▶ its worker pushes and pulls

In a late schedule the gradient is of an older ticket, computed with a version that was pulled then. The present
parameters come from the last pull, or from the worker's own step.

    one_f_one_b    F 5  B 5  push 5, pull
    ddg            F 5  B 4  push 4, pull                  a stage with gradients one step late
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, Port, Program, Strategy
from polytempo.core.bundle import by_kind
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.facts import steps_late
from polytempo.server.layout import Parameter
from polytempo.server.message import Ticket
from polytempo.training.pipeline.late.estimators import estimators_of
from polytempo.training.pipeline.late.late_stage import late_stage
from polytempo.training.pipeline.mail.step_reports import LossMail
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.pipeline_stage import Loss, MakeOptimizer, schedule_of, shares_of, stage_report
from polytempo.training.pipeline.priced_stage import PricedWork
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.training.pipeline.stage_work import computed

_CHANNEL = 970


class StagedTraining(NamedTuple):
    """The training of a model's stages."""

    strategy: Strategy
    optimizer: MakeOptimizer
    loss: Loss
    pair: Callable[[Any], tuple[tuple[Any, ...], Any]]
    """A batch as the model's inputs and the target."""
    seed: int
    who: str
    """The model's owner in errors."""
    priced: Any = None
    """The batch of every step where parameters have no values and nothing is computed; None: all is."""


class LateGradient(NamedTuple):
    """The gradient in `.grad` at an update of a stage."""

    ticket: Ticket
    samples: int
    versions: tuple[int, ...]
    """Each shard's version of the parameters that it was computed with."""


class ServedStage:
    """The stage of `model`, cut as `parts` says, at position `stages.rank` of the replica's processes.

    `own`: each stage's trained parameters, in the order of a push. Estimators of gradients are the replica's own: they
    are at no server, and begin again with it. `priced`: the batch of every step for parameters without values; then
    nothing is computed.
    """

    def __init__(
        self,
        training: StagedTraining,
        model: nn.Module,
        parts: Cut,
        own: Sequence[Sequence[Parameter]],
        stages: Port,
        flops_per_sample: float = 0.0,
        priced: list[MicroBatch] | None = None,
    ) -> None:
        schedule = self._schedule = schedule_of(training.strategy)
        self.whole = model
        """The whole model; `collected` fills the first stage's with all stages' parameters."""
        self.number, self._parts, self._own, self._training, self._port = stages.rank, parts, own, training, stages
        self.model = StageModel(parts.stages[self.number :: schedule.stages])
        self.optimizer = training.optimizer(self.model)
        self.late = steps_late(schedule)
        """The number of later steps until a batch's last gradient is back at all stages."""
        parameters, computes = list(self.model.parameters()), priced is None
        self.program = StageProgram(
            parts,
            schedule,
            self.number,
            self._update,
            shares_of(parts),
            estimators=estimators_of(schedule, self.number, training.seed),
            late=late_stage(schedule, self.number, parameters, self.optimizer) if computes else None,
            work=computed if computes else PricedWork,
        )
        self._batches = MicroBatches(parts, schedule, training.loss, training.seed, 0, flops_per_sample)
        self._priced = priced
        self._losses = LossMail(self.late)
        self._entered: deque[tuple[Ticket, int]] = deque()
        """Tickets, with their samples, that wait for an update."""
        self._under_way = False
        self._computed_with: dict[int, tuple[int, ...]] = {}
        """The shards' versions that each version of this stage's parameters is of."""

    def serve(self, exchange: Callable[[LateGradient], Program[None]], versions: Callable[[], tuple[int, ...]]) -> None:
        """Set, before the first step, the function of an update, and the shards' versions of the present parameters."""
        self._exchange, self._versions = exchange, versions

    async def step(self, batch: Any, ticket: Ticket, samples: int) -> Tensor | None:
        """Take a batch forward, and gradients back as the schedule says. The first stage answers the loss that comes
        back with them.

        Dropout draws by the ticket's number, so a batch that is dealt again is computed alike.
        """
        self._computed_with[self.program.versions.current] = self._versions()
        self._entered.append((ticket, samples))
        self._under_way = True
        loss = await self.program.step(self._port, self.micro_batches(batch, ticket.number))
        return await self._losses.step(self._port, loss)

    def micro_batches(self, batch: Any, number: int) -> list[MicroBatch]:
        """The micro-batches of the step on ticket `number`."""
        if self._priced is not None:
            return self._priced
        return self._batches.of(*self._training.pair(batch), number)

    async def drain(self) -> list[Tensor]:
        """Take all gradients back that are under way, and update by them. The first stage answers their losses."""
        if self._under_way:
            for _ in range(self.late):
                await self.program.step(self._port, [])
        self._under_way = False
        return await self._losses.rest()

    async def _update(self) -> None:
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

    async def whole_model(self) -> dict[str, Tensor]:
        """All stages' parameters and buffers as they are now, on every stage. Cost: two messages from each to each."""
        port, found = self._port.on_channel(_CHANNEL), dict[str, Tensor]()
        for stage in range(port.size):
            model = StageModel(self._parts.stages[stage :: self._schedule.stages])
            parameters = {name: each.detach() for name, each in model.named_parameters()}
            buffers = {name: each for name, each in model.named_buffers() if each.numel()}
            for group in [*by_kind(parameters).values(), *by_kind(buffers).values()]:
                bundle = Bundle(group).copy()
                flat = bundle.flat
                if stage == port.rank:
                    for other in range(port.size):
                        if other != stage:
                            await port.send(flat, other)
                else:
                    flat = await port.recv(torch.empty_like(flat), stage)
                found |= bundle.with_flat(flat).views
        return found

    def report(self) -> dict[str, Any]:
        """Delays and memory of this stage, as plain values; see `Result.stages`."""
        return stage_report(self.program, self._parts, self._schedule, self.number, self.model)
