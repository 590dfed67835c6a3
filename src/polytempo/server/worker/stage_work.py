"""Work for a replica with stages in processes: the first stage calls for it, and hands every answer on.

    coordinator ──Deal──▶ first stage ──deal──▶ all others           each trains on the batch, and pushes its own part
                ◀──Ask──              ◀──done── all others           a ticket is done when it is done at every stage

Every stage calls at the same points of its program, so the calls of a stage and the answers need no numbers. A call
before a batch is computed waits for no stage: it names batches acknowledged one call before, or as many calls before as
steps pass until a batch's gradient comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol, get_args

import torch

from polytempo.core import Port
from polytempo.server.message import Deal, Order, Ticket
from polytempo.server.worker.client import Client
from polytempo.server.worker.work_client import WorkClient

_CHANNEL = 980
_DEAL, _COUNT, _NUMBERS = range(3)
_ORDERS: Final[tuple[Order, ...]] = get_args(Order)
_OVER = -1
_DEAL_LENGTH = 5


class WorkSource(Protocol):
    """The source of a worker's tickets; `WorkClient` is one."""

    @property
    def is_open(self) -> bool:
        """True if a call waits for its answer."""

    async def ask(self, port: Port, rows: Sequence[bytes] = ()) -> None:
        """Call for work; no call may be open. It says which tickets are done, and carries rows of metrics."""

    async def deal(self, port: Port) -> Deal | None:
        """The answer to the open call; None if the run is over."""

    def drop(self) -> None:
        """Wait no more for the answer to the open call, if there is one: the next call takes its place."""


class FirstStageWork:
    """The first stage's calls. `stages`: the group of the replica's processes, in the order of stages.

    `late`: so many steps after its own a batch's last gradient comes back, so the first stage may be as far ahead.
    """

    def __init__(self, client: Client, stages: Port, late: int) -> None:
        self._client, self._stages, self._work = client, stages.on_channel(_CHANNEL), WorkClient(client)
        self._late = late
        self._acknowledged: Counter[int] = Counter()
        """Ticket -> at how many stages it is done."""
        self._calls = self._collected = 0
        self._trains = False
        """True if the last answer was to train: the next call is then posted before that is done."""

    @property
    def is_open(self) -> bool:
        """True if a call waits for its answer."""
        return self._work.is_open

    async def ask(self, port: Port, rows: Sequence[bytes] = ()) -> None:
        """Call for work. Before a pause in training it waits for the other stages' acknowledged batches."""
        self._calls += 1
        while self._collected < self._calls - self._trains * (1 + self._late):
            self._collected += 1
            for stage in range(1, self._stages.size):
                await self._collect(stage)
        self._acknowledged.update(self._client.taken_done())
        done = tuple(number for number, times in self._acknowledged.items() if times == self._stages.size)
        for number in done:
            del self._acknowledged[number]
        await self._work.ask(port, rows, done)

    async def deal(self, port: Port) -> Deal | None:
        """The coordinator's answer, which all stages get."""
        deal = await self._work.deal(port)
        self._trains = deal is not None and deal.order == "train"
        for stage in range(1, self._stages.size):
            await self._stages.send(_written(deal), stage, _DEAL)
        return deal

    def drop(self) -> None:
        """See `WorkSource`. All gradients are pushed: the next call waits for all stages' acknowledgements."""
        self._work.drop()
        self._trains = False

    async def _collect(self, stage: int) -> None:
        """Gather a stage's acknowledged batches from one of its calls to the next."""
        count = int(await self._stages.recv(torch.empty(1, dtype=torch.int64), stage, _COUNT))
        if count:
            numbers = await self._stages.recv(torch.empty(count, dtype=torch.int64), stage, _NUMBERS)
            self._acknowledged.update(numbers.tolist())


class LaterStageWork:
    """The calls of a stage behind the first one, which go to that. Its rows of metrics are the first stage's affair."""

    def __init__(self, client: Client, stages: Port) -> None:
        self._client, self._stages = client, stages.on_channel(_CHANNEL)
        self.is_open = False

    async def ask(self, port: Port, rows: Sequence[bytes] = ()) -> None:
        """Say which tickets this stage's shards have acknowledged."""
        self.is_open = True
        done = self._client.taken_done()
        await self._stages.send(torch.tensor([len(done)]), 0, _COUNT)
        if done:
            await self._stages.send(torch.tensor(done), 0, _NUMBERS)

    def drop(self) -> None:
        """See `WorkSource`."""
        self.is_open = False

    async def deal(self, port: Port) -> Deal | None:
        """The first stage's deal."""
        told = await self._stages.recv(torch.empty(_DEAL_LENGTH, dtype=torch.int64), 0, _DEAL)
        self.is_open = False
        order, number, epoch, batch, again = told.tolist()
        if order == _OVER:
            return None
        tickets = () if number < 0 else (Ticket(number, epoch, batch, bool(again)),)
        return Deal(self._client.worker, self._client.incarnation, 0, _ORDERS[order], tickets)


def work_of(client: Client, stages: Port | None, late: int = 0) -> WorkSource:
    """The source of a worker's tickets. `stages` None: it holds the whole model, and calls for itself alone.

    `late`: see `FirstStageWork`.
    """
    if stages is None:
        return WorkClient(client)
    return LaterStageWork(client, stages) if stages.rank else FirstStageWork(client, stages, late)


def _written(deal: Deal | None) -> torch.Tensor:
    """Order, ticket, epoch, batch, again; a ticket below 0 is none. A batch scheduler deals one ticket at a time."""
    if deal is None or not deal.tickets:
        return torch.tensor([_OVER if deal is None else _ORDERS.index(deal.order), -1, 0, 0, 0])
    [ticket] = deal.tickets
    return torch.tensor([_ORDERS.index(deal.order), ticket.number, ticket.epoch, ticket.batch, int(ticket.again)])
