"""`ServedHandle`: what `attach` hangs on a loop's optimizer where the strategy has a parameter server.

for batch in pt.shard(…)   a ticket from the server's batch scheduler, and its batch
loss.backward()            `.grad` is this rank's own gradient
optimizer.step()           pushes it; steps here, at the server, or both, as the strategy says; pulls
the epoch's end            every batch of it is in the server's weights, and the model has these
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import PolytempoError, Strategy
from polytempo.data.batches import Batches
from polytempo.data.shard import DataShard
from polytempo.data.usage import of_tickets
from polytempo.partition.branches import ThreadedModel
from polytempo.training.agree import agree
from polytempo.training.dealers import set_dealer
from polytempo.training.loop_facts import LoopFacts, facts_of_loop
from polytempo.training.ownership import Ownership
from polytempo.training.served_step import ServedStep
from polytempo.training.ticket_loop import ServerLink, TicketLoop
from polytempo.worlds import ProcessWorld

_ALONE_S = 300.0
"""How long a world of one waits for its server."""


class ServerStart(Protocol):
    """Starts the server's processes. All ranks have one, and only rank 0's starts any."""

    def link(self, world: ProcessWorld, facts: LoopFacts) -> ServerLink:
        """Start, and connect this rank. All ranks call it, and all raise where that fails."""

    def cancel(self) -> None:
        """It is not needed: end what was begun."""


class ServedHandle:
    """What `attach` returns where the strategy has a parameter server. Its processes start with the first epoch."""

    def __init__(
        self,
        world: ProcessWorld,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        start: ServerStart,
        *,
        allow_nan: bool,
    ) -> None:
        self.world, self._model, self._optimizer, self._strategy = world, model, optimizer, strategy
        self._start, self._allow_nan = start, allow_nan
        self._timeout_s = world.transport.timeout_s if world.size > 1 and world.life == 1 else _ALONE_S
        self.attached = True
        """Whether the hooks are on."""
        self.threaded: ThreadedModel | None = None
        """The model's branches on several threads, where `attach` was given `threads`."""
        self.account: dict[str, Any] | None = None
        """On rank 0 after `detach`: the ledger of samples, the staleness of gradients, and what became of processes."""
        self._step = ServedStep(model, optimizer, strategy, allow_nan=allow_nan)
        self._ownership = Ownership(model, optimizer)
        self._loop: TicketLoop | None = None
        self._link: ServerLink | None = None
        self._source: DataShard | None = None
        self._batches: Batches | None = None
        self._is_within = False
        set_dealer(world, self)
        atexit.register(self._at_exit)

    @property
    def step(self) -> int:
        """Optimizer steps of this rank."""
        return self._step.num_steps

    # ------------------------------------------------------------------ batches

    def takes(self, shard: DataShard) -> bool:
        """The first shard that the loop trains on is dealt by tickets; others are dealt as ever."""
        if self._source is None:
            return torch.is_grad_enabled() and self._model.training
        return self._source is shard

    def is_within(self, shard: DataShard) -> bool:
        """Whether an epoch of `shard` is under way."""
        return self._is_within and self._source is shard

    def epoch(self, shard: DataShard) -> Iterator[Any]:
        """This rank's batches until all ranks have done the epoch; without autograd, a look at the data alone."""
        if self._source is not None and not torch.is_grad_enabled():
            yield from shard.at(rank=shard.rank, size=shard.size)
            return
        loop, batches = self._begun(shard)
        self._is_within = True
        while True:
            with self._step.moving():
                ticket = loop.next_ticket()
            if ticket is None:
                break
            loop.give(ticket, batches.pick(ticket.batch).num_samples)
            yield batches.at(shard.epoch, ticket.batch)
        self._is_within = False
        shard.epoch += 1

    def _begun(self, shard: DataShard) -> tuple[TicketLoop, Batches]:
        """With the first epoch the server begins: it must know how many batches there are."""
        if self._loop is not None and self._batches is not None:
            return self._loop, self._batches
        assert self._strategy.server is not None
        if shard.consumed:
            raise ValueError(
                f"the position is sample {shard.consumed} of epoch {shard.epoch}, and a parameter server deals whole "
                "epochs; go on from the beginning of one"
            )
        batches = shard.dealt(self._strategy.server.deals)
        names = ("num_samples", "batch_size", "seed", "shuffle", "epoch")
        if self.world.life == 1:
            self.world.drive(agree(self.world.port, {f"the data's {name}": getattr(shard, name) for name in names}))
        facts = facts_of_loop(
            self._model,
            self._optimizer,
            self._strategy,
            hosts=tuple(self.world.port.hosts),
            batches_per_epoch=len(batches),
            timeout_s=self._timeout_s,
            allow_nan=self._allow_nan,
            first_epoch=shard.epoch,
            servers=0 if self.world.servers is None else len(self.world.servers.ranks),
        )
        self._link = self._start.link(self.world, facts)
        loop = TicketLoop(
            self.world.rank, facts, self._model, self._optimizer, self._strategy, self._link, life=self.world.life
        )
        for epoch in range(self._link.epochs_behind):
            if loop.next_ticket() is not None:
                raise PolytempoError(
                    f"rank {self.world.rank} has come back at epoch {shard.epoch}, and the run is still "
                    f"{self._link.epochs_behind - epoch} before it; load what the others have loaded"
                )
        self._loop, self._batches, self._source = loop, batches, shard
        self._step.begin(loop)
        return loop, batches

    # ------------------------------------------------------------------ contexts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing: gradients are exchanged by `step` alone, so those of several passes add up by themselves."""
        yield

    @contextmanager
    def join(self) -> Iterator[None]:
        """Changes nothing: batches are dealt, so ranks may have different numbers of them."""
        yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the server's, to be evaluated or saved.

        Where workers step by themselves (`downpour`, `easgd`), the rank's own parameters are there again afterwards.
        Where they do not, the model keeps the newer weights: it is a copy of the server's in any case. Each rank may
        call it by itself. `optimizer.step()` inside raises RuntimeError.

        Cost: one pull.
        """
        loop = self._loop
        if loop is None:
            yield
            return
        if not self._steps_here:
            with self._step.moving():
                loop.refresh()
            yield
            return
        if loop.replica.has_tables:
            raise ValueError(
                f"{self._strategy} steps here and has parameters with sparse gradients, of which a look brings only "
                "rows; evaluate the model at an epoch's end, where it is the server's"
            )
        self._step.lends = True
        try:
            with loop.replica.lent(loop.servers()):
                yield
        finally:
            self._step.lends = False

    @property
    def _steps_here(self) -> bool:
        """Whether ranks move their parameters by themselves, too."""
        assert self._strategy.server is not None
        return self._strategy.server.decays == "workers" or (self._loop is not None and self._loop.replica.is_apart)

    # ------------------------------------------------------------------ saving and ending

    def state_dict(self) -> dict[str, Any]:
        """Refused: the optimizer's state is spread over the shards."""
        self._refuse_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refused: see `state_dict`."""
        self._refuse_state()

    def _refuse_state(self) -> NoReturn:
        raise ValueError(
            f"the state of {self._strategy} is in its shards, which a loop of one's own does not save; save the "
            "model's inside handle.consensus() and the position of pt.shard between epochs, load both before attach, "
            "and the shards' optimizer begins anew there; or make a job of it: pt.run(job, strategy, out=…) saves all"
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss: with a parameter server there is no `precision` that would scale it."""
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let this rank's gradient have a norm of at most `max_norm`; returns the norm that it had."""
        return nn.utils.clip_grad_norm_([p for g in self._optimizer.param_groups for p in g["params"]], max_norm)

    def detach(self) -> None:
        """End the server and take the hooks off: the model has the server's final weights, and the loop is an ordinary
        one again.

        All ranks call it. It waits until all have done so, or are gone.
        """
        if not self.attached:
            return
        if self.threaded is not None:
            self.threaded.remove()
        if self._loop is None or self._link is None:
            self._start.cancel()
        else:
            self._loop.leave(fetch=True)
            self._link.close(wait_s=self._timeout_s)
            self._take_account(self._link)
        self._end()

    def _take_account(self, link: ServerLink) -> None:
        told = link.account
        if told is None or self._batches is None:
            return
        done = [(first, last) for first, last in told.pop("done")]
        applied = [[(first, last) for first, last in ranges] for ranges in told.pop("tickets")]
        self.account = {**told, "ledger": of_tickets(self._batches, done, applied)}

    def _end(self) -> None:
        atexit.unregister(self._at_exit)
        set_dealer(self.world, None)
        for hook in self._step.hooks:
            hook.remove()
        self._ownership.end()
        self.attached = False

    def _at_exit(self) -> None:
        """A loop that ends without `detach`: after its last epoch rank 0 keeps the server until all ranks are done."""
        error = getattr(sys, "last_value", None)
        if self._loop is None or self._link is None:
            self._start.cancel()
            return
        wait_s, reason = self._timeout_s, ""
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
        elif self._is_within:
            reason = "it ended within an epoch"
        with suppress(PolytempoError):  # the server has said why, or has gone: there is nothing left to end
            if not reason:
                self._loop.leave(fetch=False) if self.world.rank == 0 else self._loop.say_goodbye()
        self._link.close(wait_s=wait_s, reason=reason)
