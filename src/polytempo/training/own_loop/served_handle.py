"""`ServedHandle`: the handle of `attach` for a strategy with a parameter server.

for batch in pt.shard(…)   a ticket from the server's batch scheduler, and its batch
loss.backward()            `.grad` is this rank's own gradient
optimizer.step()           pushes it; steps here, at the server, or both, as the strategy says; pulls
the epoch's end            every batch of it is in the server's weights, and the model has these
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.data.batches import Batches
from polytempo.data.shard import DataShard
from polytempo.partition.branches import ThreadedModel
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.precision import Precision
from polytempo.training.hooks.loop_callbacks import LoopCallbacks
from polytempo.training.model.ownership import Ownership
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.observe.loop_folder import LoggingHandle
from polytempo.training.observe.loop_score import evaluating, scored
from polytempo.training.own_loop.dealt_epochs import DealtEpochs, JoinedLoop, ServerStart
from polytempo.training.own_loop.loop_facts import facts_of_loop
from polytempo.training.own_loop.served_step import ServedStep
from polytempo.training.own_loop.ticket_loop import TicketLoop
from polytempo.training.precision.masters import clip_alone, masters_of
from polytempo.worlds import ProcessWorld


class ServedHandle(LoggingHandle):
    """The answer of `attach` for a strategy with a parameter server. Its processes start with the first epoch."""

    def __init__(
        self,
        world: ProcessWorld,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        start: ServerStart,
        *,
        allow_nan: bool,
        precision: Precision | None = None,
    ) -> None:
        self.world, self._model, self._optimizer, self._strategy = world, model, optimizer, strategy
        self._start, self._allow_nan = start, allow_nan
        self.attached = True
        """True while the hooks are on."""
        super().__init__(lambda: self._epochs.traced)
        self.threaded: ThreadedModel | None = None
        """The model's branches on several threads, where `attach` was given `threads`."""
        self._masters = masters_of(model, optimizer, precision)
        self._step = ServedStep(model, optimizer, strategy, allow_nan=allow_nan, masters=self._masters)
        self.callbacks: LoopCallbacks | None = None
        """The loop's callbacks, where `attach` was given some."""
        self._ownership = Ownership(model, optimizer)
        assert strategy.server is not None
        self._epochs = DealtEpochs(
            world,
            start,
            strategy.server.deals,
            world.size,
            self._join,
            trains=lambda: torch.is_grad_enabled() and model.training,
            moving=self._step.moving,
            reading=lambda number: nullcontext(),
        )

    @property
    def step(self) -> int:
        """Optimizer steps of this rank."""
        return self._step.num_steps

    @property
    def account(self) -> dict[str, Any] | None:
        """The account of the run, on rank 0 after `detach`: ledger of samples, staleness of gradients, ends of
        processes.
        """
        return self._epochs.account

    def _join(self, shard: DataShard, batches: Batches) -> JoinedLoop:
        world = self.world
        with nullcontext() if self._masters is None else self._masters.in_float32():
            facts = facts_of_loop(
                self._model,
                self._optimizer,
                self._strategy,
                hosts=tuple(world.port.hosts),
                batches_per_epoch=len(batches),
                in_a_row=batches.run,
                timeout_s=self._epochs.timeout_s,
                allow_nan=self._allow_nan,
                first_epoch=shard.epoch,
                servers=0 if world.servers is None else len(world.servers.ranks),
            )
        link, given = self._start.link(world, facts), (self._model, self._optimizer, self._strategy)
        loop = TicketLoop(world.rank, facts, *given, link, life=world.life, masters=self._masters)
        self._step.begin(loop)
        return JoinedLoop(loop, link)

    # ------------------------------------------------------------------ contexts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: `step` alone exchanges gradients, so gradients of several passes add up automatically."""
        yield

    @contextmanager
    def join(self) -> Iterator[None]:
        """Changes nothing: batches are dealt, so ranks may have different numbers of them."""
        yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Lend the server's model to the block, to be evaluated or saved.

        Where workers make steps of their own (`downpour`, `easgd`), the rank's own parameters are there again
        afterwards. Otherwise the model keeps the newer weights: it is a copy of the server's in any case. A rank may
        call it alone. `optimizer.step()` inside raises RuntimeError.

        Cost: one pull.
        """
        loop = self._epochs.loop
        if loop is None:
            yield
            return
        assert self._strategy.server is not None
        if self._strategy.server.decays != "workers" and not loop.replica.is_apart:  # no rank moves its own parameters
            with self._step.moving():
                loop.refresh()
            yield
            return
        if loop.replica.has_tables:
            raise ValueError(
                f"{self._strategy} steps here and has parameters with sparse gradients, and a look brings only their "
                "rows; evaluate the model at an epoch's end, where it is the server's"
            )
        self._step.lends = True
        try:
            with loop.replica.lent(loop.servers()):
                yield
        finally:
            self._step.lends = False

    def evaluate(
        self, function: Callable[[Any], Any], data: Any, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Score all of `data` on the server's model, on this rank alone; see `pt.score`.

        Callbacks get rank 0's numbers (`on_evaluation`). Cost: one pull, and all of `data`.
        """
        with self.consensus(), evaluating(self._model):
            found = self.world.drive(scored(self.world.port.among((self.world.rank,)), function, data, metrics))
        if self.callbacks is not None and self.world.rank == 0:
            self.callbacks.evaluated(found)
        return found

    # ------------------------------------------------------------------ callbacks

    def begin_callbacks(self, callbacks: CallbackHost) -> None:
        """Let `callbacks` see rank 0's steps from now on."""
        requests = RowRequests(callbacks, self._epochs)
        self.callbacks = LoopCallbacks(self.world, self._model, callbacks, requests, self._epochs.position)
        self._step.on_end = self.callbacks.stepped

    def asked(self) -> Control:
        """Rank 0's requests since the last call, on rank 0 alone: it evaluates and saves alone. A request to stop
        reaches all ranks: see `stopped`.
        """
        asked = Control() if self.callbacks is None else self.callbacks.asked()
        return asked._replace(stop=self.stopped)

    @property
    def stopped(self) -> bool:
        """True once a callback has asked for the end and every batch that was dealt is in the model.

        `pt.shard` ends there, on all ranks, and later epochs are empty.
        """
        return self._epochs.loop is not None and self._epochs.loop.stopped

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
            "and the shards' optimizer begins again there; or make a job of it: pt.run(job, strategy, out=…) saves all"
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss: with a parameter server no `precision` scales it."""
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let this rank's gradient have a norm of at most `max_norm`; returns the norm that it had. With a `precision`
        the coming step does the scaling, and `.grad` stays as it is."""
        held = (p for group in self._optimizer.param_groups for p in group["params"])
        return clip_alone(held, self._masters, max_norm)

    def detach(self) -> None:
        """End the server and take the hooks off: the model has the server's final weights, and the loop is an ordinary
        one again.

        All ranks call it. It waits until all have done so, or are gone.
        """
        if not self.attached:
            return
        if self.threaded is not None:
            self.threaded.remove()
        if self.callbacks is not None:
            self.callbacks.finish()
        self._epochs.leave()
        for hook in self._step.hooks:
            hook.remove()
        if self._masters is not None:
            self._masters.end()
        self._ownership.end()
        self.loop_log.close()
        self.attached = False


class RowRequests:
    """Rank 0's requests: a request to stop goes to the server, with the next call for work."""

    def __init__(self, host: CallbackHost, epochs: DealtEpochs) -> None:
        self._host, self._epochs = host, epochs

    def after_step(self, step: int) -> Control:
        """See `LoopRequests`."""
        asked = self._host.take()
        if asked.stop and self._epochs.loop is not None:
            self._epochs.loop.ask_to_stop()
        return asked

    def after_evaluation(self) -> Control:
        """See `LoopRequests`."""
        return self.after_step(0)

    def close(self) -> None:
        """Nothing is under way."""
