"""`ServedWorker`: a worker's steps with a parameter server, whether the loop around them is a job's or the caller's.

    begin ──▶ client.begin ──▶ before_step ──▶ optimizer.step ──▶ after_step ──▶ … push_held ──▶ settled
              the push's facts └──────────────── step ────────────────┘

It performs nothing itself: its methods are coroutines for `server.worker.server_calls`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Program, Strategy
from polytempo.server.message import Ticket
from polytempo.server.worker.client import Client
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.pipeline.served_stage import LateGradient, ServedStage
from polytempo.training.precision.masters import Masters
from polytempo.training.served.served_replica import ServedReplica, Trained
from polytempo.training.served.shard_rule import rates_of
from polytempo.training.step.guard import Guard
from polytempo.training.step.step_cost import update_use

_UPDATE_FLOPS = 4.0
_MOST_EMPTY_STEPS = 10_000
"""No strategy holds gradients back for longer."""


class ServedWorker:
    """The worker of `client`. `port`: the group of all workers that hold the same parameters.

    `decay`: where workers add the weight decay. `guard`: looks for gradients of `stage` that are not finite. See
    `ServedReplica` about the others.
    """

    def __init__(
        self,
        port: Port,
        client: Client,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        *,
        masters: Masters | None = None,
        decay: LocalDecay | None = None,
        guard: Guard | None = None,
        stage: ServedStage | None = None,
        trained: Trained | None = None,
    ) -> None:
        assert strategy.server is not None
        self._port, self._client, self._optimizer, self._strategy = port, client, optimizer, strategy
        self._rate = strategy.server.rate
        self._masters, self._decay, self._guard, self._stage = masters, decay, guard, stage
        self.replica = ServedReplica(port, model, optimizer, strategy, client, masters, trained)
        self.clock = 0
        self.begun_s: float | None = None
        self.idle_s = 0.0
        """Seconds that it has waited for the server or for work since then."""
        if stage is not None:
            stage.serve(self._exchange_late, lambda: tuple(client.versions))

    def step_of(self, ticket: Ticket) -> int:
        """The run's step of the ticket's batch, as if all workers took their steps together."""
        return ticket.number // self._port.size

    @property
    def rates(self) -> tuple[float, ...]:
        """The present learning rate of each parameter group, as the server is to have it."""
        rates = rates_of(self._optimizer)
        return rates if self._rate is None else tuple(self._rate(self._port.size) * each for each in rates)

    async def waited(self, what: Program[Any]) -> Any:
        """Await `what`; the time counts as idle once training has begun."""
        before_s = await self._port.now()
        answer = await what
        if self.begun_s is not None:
            self.idle_s += await self._port.now() - before_s
        return answer

    async def begin(self) -> None:
        """Fetch the weights at the first work. Before that others may have trained them.

        Fetch also when shards have come or gone: gradients count from their versions.
        """
        if self.begun_s is None:
            self.begun_s = await self._port.now()
            await self.waited(self.fetch())
            self.replica.begin()
        elif self.replica.is_outdated:
            await self.waited(self.replica.renew(self.clock))

    async def fetch(self, *, last: bool = False) -> None:
        """Take over the server's weights. `last`: the run's resulting ones, for the worker's work is over."""
        await self.replica.fetch(self.clock, last=last)

    # ------------------------------------------------------------------ a step

    async def step(self) -> None:
        """The strategy's two transforms with the local step between them."""
        replica, optimizer = self.replica, self._optimizer
        with nullcontext() if self._masters is None else self._masters.whole_step():
            if self._decay is not None and replica.has_values:
                self._decay.add_()
            if await self.before_step():
                flops, uses = _UPDATE_FLOPS * replica.numel, (update_use(optimizer),)
                await self._port.compute(optimizer.step if replica.has_values else _no_step, flops, uses=uses)
            if replica.has_values:
                optimizer.zero_grad()
            await self.after_step()

    async def before_step(self) -> bool:
        """Exchange gradients; whether the optimizer is to make its step."""
        self.clock += 1
        steps: bool = await self.waited(self.replica.exchange_gradients(empty=False))
        return steps

    async def after_step(self) -> None:
        """Exchange parameters."""
        await self.waited(self.replica.exchange_parameters())

    async def _exchange_late(self, late: LateGradient) -> None:
        """An update of the stage's parameters, by the gradient that is then there."""
        self.replica.look_up()
        versions = None if self.replica.is_apart else late.versions
        self._client.begin((late.ticket.number,), self.rates, late.samples, versions=versions)
        if self._guard is not None:
            self._guard.gradients(self.step_of(late.ticket), self._client.worker)
        await self.step()

    # ------------------------------------------------------------------ batches under way

    async def drain(self) -> list[Tensor]:
        """Take back the batches under way in the stages; returns their losses."""
        return [] if self._stage is None else await self._stage.drain()

    async def push_held(self) -> None:
        """Let the strategy push the gradients that it holds back, by steps without a gradient."""
        for _ in range(_MOST_EMPTY_STEPS):
            if not self._client.held:
                break
            await self.waited(self.replica.exchange_gradients(empty=True))
            await self.after_step()
        else:
            raise ValueError(
                f"{self._strategy} holds gradients back for more than {_MOST_EMPTY_STEPS} steps; push more often"
            )
        if self.begun_s is not None:
            await self.waited(self.replica.settle())


def _no_step() -> None:
    """The step of parameters without values."""
