"""A worker without a model: production's `Client` and `through`, with gradients that count tickets.

    ask ─▶ ticket t ─▶ pull ─▶ "compute" for a while ─▶ push a gradient of -1 at place t of every shard ─▶ ask …

With plain SGD at learning rate 1 every shard's weight t then says how often ticket t was applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from polytempo.core import WAITING, Op, Port, Task
from polytempo.core.op import Compute, Now, Post, Take
from polytempo.core.port import world_port
from polytempo.server.layout import Span, Spans
from polytempo.server.message import Message, Outbox, Ticket
from polytempo.server.worker.client import Client
from polytempo.server.worker.server_calls import through
from polytempo.server.worker.work_client import WorkClient

_FLOPS_PER_S = 2.0**30
"""A power of two, so that seconds come back to the bit."""


@dataclass(frozen=True)
class Habits:
    """A worker's behaviour: seconds a step, drawn evenly between two bounds; pushes; and whether it waits for them."""

    least_s: float = 0.02
    most_s: float = 0.08
    push_every: int = 1
    overlap: bool = False
    asks_ahead: bool = False
    """True if it calls for the next ticket before it has trained on the last one."""

    def slowed(self, factor: float) -> Habits:
        """The same at another speed."""
        return replace(self, least_s=self.least_s * factor, most_s=self.most_s * factor)


class ChaosWorker:
    """A process that runs the training program: a world of one rank, with a mailbox."""

    def __init__(
        self,
        client: Client,
        num_tickets: int,
        habits: Habits,
        random: Random,
        on_read: Callable[[Client, int, Tensor], None],
    ) -> None:
        """Each shard has `num_tickets` weights. `on_read(client, clock, weights)` sees all weights that are read."""
        self.client = client
        self.finished = False
        port = world_port(client.worker, (0,) * (client.coordinator + 1))
        self._training = _Training(client, port, num_tickets, habits, random, on_read)
        self._task: Task[None] | None = None
        self._mail: deque[tuple[int, Message]] = deque()
        self._takes = False
        """True while the program waits for mail."""
        self._now_s = self._until_s = 0.0
        self._out: Outbox = []

    @property
    def waits_in(self) -> str:
        """The functions and lines that the program waits in, as text."""
        frame: Any = None if self._task is None else self._task.coroutine
        places = []
        while frame is not None and getattr(frame, "cr_frame", None) is not None:
            places.append(f"{frame.cr_code.co_name}:{frame.cr_frame.f_lineno}")
            frame = frame.cr_await
        return " ".join([*places, *map(str, self.client._pending.values())])

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Put the message into the mailbox; the program goes on if it waits for one."""
        self._mail.append((source, message))
        if self._takes:
            return self._go(now_s, self._mail.popleft())
        return []

    def tick(self, now_s: float) -> Outbox:
        """Go on if the time has come."""
        return self._go(now_s, None) if not self.finished and now_s >= self._until_s else []

    def wait_s(self, now_s: float) -> float:
        """Seconds until the program goes on."""
        return float("inf") if self.finished else max(0.0, self._until_s - now_s)

    def _go(self, now_s: float, value: Any) -> Outbox:
        """Resume the program with `value`, and perform its next operations until it waits."""
        if self._task is None:  # not before: a worker that dies first leaves nothing that was never begun
            program = through(self.client, self._training.port, self._training.run())
            self._task = Task(program)
        self._now_s, self._takes = now_s, False
        self.finished = self._task.resume(self._begin, value)
        if self.finished:
            self._task.result()
        out, self._out = self._out, []
        return out

    def _begin(self, op: Op[Any]) -> Any:
        match op:
            case Post(message, to):
                assert isinstance(message, Message)
                return self._out.append((to, message))
            case Now():
                return self._now_s
            case Take(wait_s) if not self._mail and wait_s != 0:
                self._until_s, self._takes = float("inf") if wait_s is None else self._now_s + wait_s, True
                return WAITING
            case Take():
                return self._mail.popleft() if self._mail else None
            case Compute(_, flops):
                self._until_s = self._now_s + flops / _FLOPS_PER_S
                return WAITING
            case _:
                raise TypeError(f"this world does not perform {op}")


@dataclass
class _Training:
    """The program: the steps of `training.served.worker_program`, without the model."""

    client: Client
    port: Port
    num_tickets: int
    habits: Habits
    random: Random
    on_read: Callable[[Client, int, Tensor], None]
    clock: int = 0
    held: list[int] = field(default_factory=list)
    under_way: list[tuple[Tensor, Any]] = field(default_factory=list)
    """Pushes that the program has not waited for, with the buffers that are lent to them."""

    async def run(self) -> None:
        while True:
            if not self.work_client.is_open:
                await self.work_client.ask(self.port)
            deal = await self.work_client.deal(self.port)
            if deal is None:
                return
            if deal.order == "train" and self.habits.asks_ahead:
                await self.work_client.ask(self.port)
            for ticket in deal.tickets:
                await self.train(ticket)
            if deal.order != "train":
                self.client.alone = True
                await self.push()
                self.client.rest()
                await self.settle()
            if deal.order == "finish":
                await self.say_goodbye()
                return

    async def say_goodbye(self) -> None:
        """One more call confirms the order to finish. It gets no answer; if it is lost, the worker is given up."""
        await self.work_client.ask(self.port)

    async def train(self, ticket: Ticket) -> None:
        if ticket.again:
            await self.push()
        self.client.alone = ticket.again
        weights = await self.port.pull(self.clock)
        self.on_read(self.client, self.clock, weights)
        self.held.append(ticket.number)
        self.client.begin([ticket.number], (1.0,), 1)
        self.clock += 1
        seconds = self.random.uniform(self.habits.least_s, self.habits.most_s)
        await self.port.compute(lambda: None, seconds * _FLOPS_PER_S)
        if ticket.again or len(self.held) >= self.habits.push_every:
            await self.push()

    async def push(self) -> None:
        """Push the held tickets. The buffer is lent until the push is done, and written to again after that."""
        if not self.held:
            return
        await self.settle(keep=1 if self.habits.overlap else 0)
        buffer = self.spare()
        buffer.zero_()
        for ticket in self.held:
            buffer[ticket :: self.num_tickets] -= 1.0
        self.held = []
        self.under_way.append((buffer, await self.port.start(self.port.push(buffer, self.clock))))
        await self.settle(keep=1 if self.habits.overlap else 0)

    def spare(self) -> Tensor:
        """A buffer that is not lent: buffers of finished pushes are used again soon."""
        lent = [buffer for buffer, _ in self.under_way]
        for buffer in self.buffers:
            if not any(buffer is other for other in lent):
                return buffer
        raise AssertionError("more pushes under way than buffers")

    async def settle(self, keep: int = 0) -> None:
        """Wait for pushes, the oldest first."""
        while len(self.under_way) > keep:
            buffer, work = self.under_way.pop(0)
            await work
            buffer.fill_(1e6)  # no longer lent: a shard that still reads it breaks a check

    def __post_init__(self) -> None:
        """Two buffers: one to write to while the other is lent."""
        self.work_client = WorkClient(self.client)
        numel = self.num_tickets * len(self.client.shards)
        self.buffers = [torch.zeros(numel) for _ in range(2)]


def spans(num_shards: int, num_tickets: int) -> Sequence[Spans]:
    """Every shard holds one weight for each ticket."""
    return [(Span(s * num_tickets, (s + 1) * num_tickets),) for s in range(num_shards)]
