"""`DealtEpochs`: the epochs of a loop of one's own with batches from a parameter server, and the end of that server.

for batch in pt.shard(…)   a ticket, and its batch       the server begins with the first epoch
                           no ticket is left             the epoch is done, by all ranks
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import torch

from polytempo.core import PolytempoError
from polytempo.data.batches import Batches
from polytempo.data.plan import Deals
from polytempo.data.shard import DataShard
from polytempo.data.usage import of_tickets
from polytempo.training.model.agree import agree
from polytempo.training.own_loop.loop_facts import LoopFacts
from polytempo.training.own_loop.ticket_loop import ServerLink, TicketLoop
from polytempo.worlds import ProcessWorld
from polytempo.worlds.process.mail import MailWorld

ALONE_S = 300.0
"""Seconds that a world of one waits for its server."""


class ServerStart(Protocol):
    """Starts the server's processes. All ranks have one, and only rank 0's starts any."""

    def link(self, world: ProcessWorld, facts: LoopFacts) -> ServerLink:
        """Start, and connect this rank. All ranks call it, and all raise where that fails."""

    def cancel(self) -> None:
        """End a start that is not needed."""


class JoinedLoop(NamedTuple):
    """A rank's part of a run that has begun."""

    loop: TicketLoop
    link: ServerLink


class DealtEpochs:
    """The epochs of one rank. `join(shard, batches)` starts the server and connects this rank.

    `replicas`: the number of trained models that get batches. `trains()`: whether a shard that is iterated now is to be
    trained on. `moving()` is entered where the server's parameters are placed, `reading(ticket)` where a batch is read.
    """

    def __init__(
        self,
        world: ProcessWorld,
        start: ServerStart,
        deals: Deals,
        replicas: int,
        join: Callable[[DataShard, Batches], JoinedLoop],
        trains: Callable[[], bool],
        moving: Callable[[], AbstractContextManager[None]],
        reading: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._world, self._start, self._deals, self._replicas = world, start, deals, replicas
        self._join, self._trains, self._moving, self._reading = join, trains, moving, reading
        self.timeout_s = world.transport.timeout_s if world.size > 1 and world.life == 1 else ALONE_S
        self.joined: JoinedLoop | None = None
        self.account: dict[str, Any] | None = None
        """The account on rank 0 after the end: the ledger of samples, the staleness of gradients, the ends of
        processes."""
        self._source: DataShard | None = None
        self.batches: Batches | None = None
        self.done = 0
        """Epochs that this rank has been through."""
        self._within, self._newest = False, 0
        world.epoch_source = self
        atexit.register(self.at_exit)

    @property
    def loop(self) -> TicketLoop | None:
        """The rank's part of the run; None before the first epoch."""
        return None if self.joined is None else self.joined.loop

    @property
    def traced(self) -> MailWorld | None:
        """The world of the rank's messages to the server; None before the first epoch."""
        return None if self.joined is None else self.joined.loop.world

    @property
    def within(self) -> bool:
        """True while an epoch is under way."""
        return self._within

    def position(self) -> tuple[float, int]:
        """Epochs and samples up to this rank's newest batch."""
        if self.batches is None or not self._newest:
            return 0.0, 0
        epochs = self._newest / len(self.batches)
        return epochs, round(epochs * self.batches.num_samples)

    # ------------------------------------------------------------------ a `EpochSource`

    def takes(self, shard: DataShard) -> bool:
        """The first shard that the loop trains on is dealt by tickets; others are dealt as ever."""
        return self._trains() if self._source is None else self._source is shard

    def is_within(self, shard: DataShard) -> bool:
        """True while an epoch of `shard` is under way."""
        return self._within and self._source is shard

    def epoch(self, shard: DataShard) -> Iterator[Any]:
        """This rank's batches until all ranks have done the epoch; without autograd, a look at the data alone."""
        if self._source is not None and not torch.is_grad_enabled():
            yield from shard.at(rank=shard.rank, size=shard.size)
            return
        loop, batches = self._begun(shard)
        if loop.stopped:
            return
        self._within = True
        while True:
            with self._moving():
                ticket = loop.next_ticket()
            if ticket is None:
                break
            loop.give(ticket, batches.pick(ticket.batch).num_samples)
            self._newest = ticket.number + 1
            with self._reading(ticket.number):
                batch = batches.at(shard.epoch, ticket.batch)
            yield batch
        self._within = False
        if not loop.stopped:
            self.done += 1
            shard.epoch += 1

    def _begun(self, shard: DataShard) -> tuple[TicketLoop, Batches]:
        """Begin the server with the first epoch: it must know the number of batches."""
        if self.joined is not None and self.batches is not None:
            return self.joined.loop, self.batches
        if shard.used:
            raise ValueError(
                f"the position is sample {shard.used} of epoch {shard.epoch}, and a parameter server deals whole "
                "epochs; go on from the beginning of one"
            )
        batches = shard.at(rank=0, size=self._replicas).dealt(self._deals)
        names = ("num_samples", "batch_size", "seed", "shuffle", "epoch")
        if self._world.life == 1:
            self._world.drive(agree(self._world.port, {f"the data's {name}": getattr(shard, name) for name in names}))
        loop, link = self._join(shard, batches)
        for epoch in range(link.epochs_behind):
            if loop.next_ticket() is not None:
                raise PolytempoError(
                    f"rank {self._world.rank} has come back at epoch {shard.epoch}, and the run is still "
                    f"{link.epochs_behind - epoch} before it; load the checkpoint that the others have loaded"
                )
        self.joined, self.batches, self._source = JoinedLoop(loop, link), batches, shard
        return loop, batches

    # ------------------------------------------------------------------ the end

    def leave(self) -> None:
        """End the server: the model has its final weights. All ranks call it; it waits until all have, or are gone."""
        if self.joined is None:
            self._start.cancel()
        else:
            self.joined.loop.leave(fetch=True)
            self.joined.link.close(wait_s=self.timeout_s)
            self._take_account(self.joined.link)
        atexit.unregister(self.at_exit)
        self._world.epoch_source = None

    def _take_account(self, link: ServerLink) -> None:
        told = link.account
        if told is None or self.batches is None:
            return
        done = [(first, last) for first, last in told.pop("done")]
        applied = [[(first, last) for first, last in ranges] for ranges in told.pop("tickets")]
        self.account = {**told, "ledger": of_tickets(self.batches, done, applied)}

    def at_exit(self) -> None:
        """A loop that ends without `leave`: after its last epoch rank 0 keeps the server until all ranks are done."""
        error = getattr(sys, "last_value", None)
        if self.joined is None:
            self._start.cancel()
            return
        loop, link = self.joined
        reason = ""
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
        elif self._within:
            reason = "it ended within an epoch"
        with suppress(PolytempoError):  # the server has said why, or has gone: there is nothing left to end
            if not reason:
                loop.leave(fetch=False) if self._world.rank == 0 else loop.say_goodbye()
        link.close(wait_s=self.timeout_s, reason=reason)
