"""`TicketLoop`: one rank's part of a loop with parameters at a server. The loop is the caller's own.

    next_ticket ──▶ batch ──▶ gradient ──▶ before_step ──▶ optimizer.step ──▶ after_step ──▶ next_ticket …
         │ None: the epoch is over                                                    leave: no more

`training.served.worker_program` is the same with a loop of its own. Between the calls nothing happens: messages wait in
the mailbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import PolytempoError, Program, Strategy, interpreted
from polytempo.server.message import Ticket
from polytempo.server.snapshots.snapshot import states_of
from polytempo.server.worker.server_calls import ServerCalls
from polytempo.server.worker.stage_messages import StageMessages
from polytempo.server.worker.stage_work import work_of
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.model.run_device import device_of
from polytempo.training.own_loop.loop_facts import LoopFacts
from polytempo.training.pipeline.served_stage import ServedStage
from polytempo.training.precision.masters import Masters
from polytempo.training.served.served_replica import ServersModel
from polytempo.training.served.served_worker import ServedWorker
from polytempo.worlds.process.mail import Mail, MailWorld

T = TypeVar("T")

LEAVE = b'{"kind": "leave", "worker": %d}'
"""The row of a rank that wants no more batches."""

STOP = b'{"kind": "stop"}'
"""The row that asks the server to end the loop."""

RETURN = '{{"kind": "return", "worker": {worker}, "process": {process}, "host": "{host}"}}'
"""The row of a rank that has come back, with its process and host."""


class ServerLink(Protocol):
    """A rank's connection to the server's processes."""

    @property
    def mail(self) -> Mail:
        """This rank's mailbox. Its `take` raises PolytempoError where the server has ended before its time."""

    def close(self, *, wait_s: float, reason: str = "") -> None:
        """Let go of the server. On rank 0 it ends: alone within `wait_s`, or, with a `reason`, immediately."""

    @property
    def greeting(self) -> tuple[bytes, ...]:
        """Rows that go with the first call for work."""

    @property
    def epochs_behind(self) -> int:
        """Epochs of the run before this rank's first one, if the rank comes back."""

    @property
    def account(self) -> dict[str, Any] | None:
        """The server's account at its end; on rank 0, after `close`."""


class Dealt(NamedTuple):
    """A batch that the loop has been given, and that no step has used yet."""

    ticket: Ticket
    samples: int


class TicketLoop:
    """Rank `rank` of a loop. `facts` are the same on all ranks. `life`: how many processes it has had.

    In a pipeline, `model` and `optimizer` belong to this rank's stage: see `train`.
    """

    def __init__(
        self,
        rank: int,
        facts: LoopFacts,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        link: ServerLink,
        *,
        life: int = 1,
        stage: ServedStage | None = None,
        masters: Masters | None = None,
    ) -> None:
        plan, topology, self.rank = facts.plan, facts.plan.topology, rank
        self._client = plan.client(rank, plan.incarnation + life - 1)
        self.world = MailWorld(rank, link.mail, plan.hosts, max_events=0)
        port = self.world.port
        self._port = port.among(topology.beside(rank))
        self._calls = ServerCalls(self._client, port, device_of(model))
        self._stage = stage
        self._messages: StageMessages | None = None
        if stage is not None:
            self._messages = StageMessages(port, topology.replica_of(rank), self._client.incarnation, plan.timing)
        stages = None if stage is None else port.among(topology.replica_of(rank))
        self._work = work_of(self._client, stages, 0 if stage is None else stage.late)
        decay = LocalDecay(optimizer) if stage is not None and plan.service.decays == "workers" else None
        self._greeting = link.greeting
        given = self._port, self._client, model, optimizer, strategy
        self._worker = ServedWorker(*given, masters=masters, decay=decay, stage=stage)
        self.replica = self._worker.replica
        self.dealt: list[Dealt] = []
        self.losses: list[Tensor] = []
        """Losses of batches that came back without a step, since the loop last asked."""
        self._tickets: deque[Ticket] = deque()
        self._met = self._alone = False
        self.stopped = False
        """True once the server has ended the loop: a callback has asked for it."""

    def check_pushes(self, check: Callable[[], None]) -> None:
        """Call `check` before a push leaves a device."""
        self._calls.before_push = check

    def ask_to_stop(self) -> None:
        """Ask the server, with the next call for work, to deal no more batches to any rank."""
        self._greeting = (*self._greeting, STOP)

    # ------------------------------------------------------------------ batches

    def next_ticket(self) -> Ticket | None:
        """The right to train on one more batch; None where the epoch is done, by all ranks."""
        return self._drive(self._next_ticket())

    def give(self, ticket: Ticket, samples: int) -> None:
        """The loop has its batch now."""
        self.dealt.append(Dealt(ticket, samples))

    async def _next_ticket(self) -> Ticket | None:
        while not self._tickets:
            if not self._work.is_open:
                await self._ask()
            deal = await self._work.deal(self._port)
            match None if deal is None else deal.order:
                case "train":
                    assert deal is not None
                    self._tickets.extend(deal.tickets)
                    await self._worker.begin()
                    await self._ask()  # the answer travels while the loop computes
                case "wait":
                    await self._push_all()
                case "pause" | "stop":
                    self.stopped = deal is not None and deal.order == "stop"
                    await self._worker.begin()
                    await self.replica.settle()
                    if not self.replica.is_apart:
                        await self.replica.refresh(self._worker.clock)
                    return None
                case _:
                    raise PolytempoError(
                        f"rank {self.rank}: the server deals no more batches to this rank, for it was taken to be lost"
                    )
        ticket = self._tickets.popleft()
        if ticket.again:
            await self._push_all()
        return ticket

    async def _ask(self) -> None:
        greeting, self._greeting = self._greeting, ()
        await self._work.ask(self._port, greeting)

    # ------------------------------------------------------------------ steps

    def before_step(self) -> bool:
        """Exchange gradients; whether the optimizer is to make its step."""
        self._alone = any(ticket.again for ticket, _ in self.dealt)
        if not self.dealt:
            self._client.begin((), self._worker.rates, 1)
        self._count_dealt()
        return self._drive(self._worker.before_step())

    def train(self, batch: Any) -> Tensor | None:
        """The batch that was dealt last, through this rank's stage, with the exchange of the gradient that is then
        there. The first stage answers the loss that comes back with it."""
        return self._drive(self._train(batch))

    async def _train(self, batch: Any) -> Tensor | None:
        assert self._stage is not None
        [(ticket, samples)] = self.dealt
        self.dealt.clear()
        loss = await self._stage.step(batch, ticket, samples)
        if ticket.again:
            await self._push_all()
        return loss

    def finish(self) -> None:
        """Push all that is under way or held back."""
        self._drive(self._push_all())

    def _count_dealt(self) -> None:
        """The next push is of the batches that the loop has been given."""
        for ticket, samples in self.dealt:
            self._client.begin((ticket.number,), self._worker.rates, samples)
        self.dealt.clear()

    def after_step(self) -> None:
        """Exchange parameters."""
        self._drive(self._after_step())

    async def _after_step(self) -> None:
        await self._worker.after_step()
        if self._alone:
            await self._push_all()

    async def _push_all(self) -> None:
        self.losses += await self._worker.drain()
        self._count_dealt()  # batches that no step has used: their gradients are in `.grad`, or the loop left them out
        await self._worker.push_held()

    # ------------------------------------------------------------------ looks, and the end

    def refresh(self) -> None:
        """Take over the server's weights."""
        self._drive(self.replica.refresh(self._worker.clock))

    def servers(self) -> ServersModel:
        """The server's weights, in memory of their own."""
        return self._drive(self.replica.servers(self._worker.clock))

    def states(self) -> list[Tensor]:
        """The states of all shards, between two epochs; one rank calls it, while the others wait."""
        heads = [asked.head for asked in self._client.asked]
        return self._drive(states_of(self._port, heads, self._client.timing))

    def whole(self) -> dict[str, Tensor]:
        """The parameters and buffers of all stages, by the whole model's names; all stages of a replica call it."""
        assert self._stage is not None
        return self._drive(self._stage.whole_model())

    def leave(self, *, fetch: bool) -> None:
        """Push held gradients, want no more batches, and wait until no rank wants any; `fetch`: the final weights.

        If a rank trains on, this waits for it.
        """
        self._drive(self._leave(fetch=fetch))

    def say_goodbye(self) -> None:
        """Want no more batches, and wait for nothing."""
        self._drive(self._leave(fetch=False) if self.stopped else self._retire())

    async def _leave(self, *, fetch: bool) -> None:
        await self._push_all()
        over = self.stopped
        if not over:
            await self._retire()
            while (deal := await self._work.deal(self._port)) is not None and deal.order not in ("finish", "stop"):
                await self._retire()
            over = deal is not None
        if fetch and over:
            await self._worker.begin()
            await self.replica.refresh(self._worker.clock, last=True)
        if over:
            await self._work.ask(self._port)  # which says goodbye

    async def _retire(self) -> None:
        self._work.drop()
        await self._work.ask(self._port, [LEAVE % self.rank])

    def _drive(self, program: Program[T]) -> T:
        if self._messages is not None:
            program = self._among_stages(program, self._messages)
        return self.world.drive(interpreted(program, self._calls.perform))

    async def _among_stages(self, program: Program[T], messages: StageMessages) -> T:
        """Run the program with messages between the replica's stages, which meet before the first one."""
        if not self._met:
            self._met = True
            await messages.meet()
        return await interpreted(program, messages.perform)
