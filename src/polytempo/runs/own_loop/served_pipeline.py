"""`ServedPipeline`: a pipeline in a loop of one's own; each stage has a parameter server.

pt.shard(loader) ── ticket ──▶ the same batch at all stages of a replica ──▶ pipe.step(x, y)
                                                             stage 0 ── push, pull ── its shards
                                                             stage 1 ── push, pull ── its shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.port import barrier
from polytempo.data.batches import Batches
from polytempo.data.shard import DataShard
from polytempo.partition.cutting import By
from polytempo.runs.served.served_stages import ServedStages
from polytempo.server.service import check_service
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.callbacks.reading import NO_CALLBACKS, Callbacks
from polytempo.training.hooks.loop_callbacks import LoopCallbacks
from polytempo.training.model.agree import broadcast_model
from polytempo.training.model.randomness import kept_random_states, seed_step
from polytempo.training.model.requirements import check_served
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.observe.loop_folder import LoggingHandle
from polytempo.training.own_loop.dealt_epochs import DealtEpochs, JoinedLoop, ServerStart
from polytempo.training.own_loop.loop_facts import LoopFacts, facts_of_loop
from polytempo.training.own_loop.served_handle import RowRequests
from polytempo.training.own_loop.ticket_loop import TicketLoop
from polytempo.training.pipeline.pipeline import agreed_cut
from polytempo.training.pipeline.pipeline_stage import Loss, of_parameters, schedule_of
from polytempo.training.pipeline.served_stage import ServedStage, StagedTraining
from polytempo.training.served.shard_rule import parameters_of
from polytempo.worlds import ProcessWorld

_NONE_YET = "the server begins with the first epoch of pt.shard(loader)"


class ServedPipeline(LoggingHandle):
    """One rank's stage. `model` holds its parts, `optimizer` the parameters that this rank steps itself.

    Rank r is stage r // D of replica r mod D. A step trains on the batch that `pt.shard` has just dealt: the same on
    all stages of a replica, drawn alike where reading it draws random numbers. Dropout draws by the ticket.

    A rank that ends takes its replica along: its other ranks raise `PolytempoError`, and their batches go to the other
    replicas.
    """

    def __init__(
        self,
        world: ProcessWorld,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        loss: Loss,
        strategy: Strategy,
        between: Strategy,
        sample: Any,
        by: By | Sequence[str],
        max_norm: float | None,
        seed: int,
        start: ServerStart,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        """`between`: the strategy that names the server; `strategy` itself, if it has the stages already."""
        super().__init__(lambda: self._epochs.traced)
        self._world, self._strategy, self._between, self._start = world, strategy, between, start
        self._seed, self.schedule = seed, schedule_of(strategy)
        assert strategy.server is not None
        make = of_parameters(optimizer)
        self._whole, whole_optimizer = model, make(model)
        _check(world, model, whole_optimizer, strategy, max_norm)
        self.cut, self._told = agreed_cut(world, world.port, model, strategy, sample, by, seed, max_norm, callbacks)
        if world.size > 1:
            world.drive(broadcast_model(world.port, model, frozenset()))
        self._optimizer = whole_optimizer
        training = StagedTraining(strategy, make, loss, _pair, seed, "this loop")
        found = parameters_of(model, whole_optimizer, strategy)
        self._stages = ServedStages(training, model, self.cut, found, strategy.server.shards)
        replicas = world.size // self.schedule.stages
        self.stage = world.rank // replicas
        members = range(world.rank % replicas, world.size, replicas)
        self._stage: ServedStage = self._stages.stage(world.port.among(tuple(members)), 0.0)
        self.model, self.optimizer = self._stage.model, self._stage.optimizer
        self._resumed: Mapping[str, Any] | None = None
        self._epochs = DealtEpochs(
            world,
            start,
            strategy.server.deals,
            replicas,
            self._join,
            trains=torch.is_grad_enabled,
            moving=nullcontext,
            reading=self._reading,
        )
        self._steps = 0
        self._callbacks: LoopCallbacks | None = None

    def begin_callbacks(self, host: CallbackHost) -> None:
        """Call `on_start`, and the other callbacks in the steps to come. All ranks call it before the first step."""
        requests = RowRequests(host, self._epochs)
        self._callbacks = LoopCallbacks(self._world, self.model, host, requests, self._epochs.position)

    @property
    def steps(self) -> int:
        """Steps of this rank so far, with the steps before it was resumed."""
        return self._steps

    @property
    def writes(self) -> bool:
        """True on the rank that writes the loop's folder: the first replica's first stage, which gets the loss."""
        return self._world.rank == 0

    # ------------------------------------------------------------------ training

    def step(self, *batch: Any) -> Tensor | None:
        """Train on the batch that `pt.shard` has dealt: the model's inputs, then the target.

        The first stage answers the mean loss of the batch that has come back, if one has; others None.
        """
        if len(batch) != len(self.cut.inputs) + 1:
            names = ", ".join((*self.cut.inputs, "target"))
            raise ValueError(f"step takes the model's inputs and the target, ({names}); got {len(batch)} arguments")
        loop = self._epochs.loop
        if loop is None or len(loop.dealt) != 1:
            dealt = 0 if loop is None else len(loop.dealt)
            raise RuntimeError(
                f"{self._strategy} has parameter servers, which deal the batches, and {dealt} were dealt since the "
                "last step; take one batch of pt.shard(loader) for each step, on all stages"
            )
        loss = loop.train(batch)
        self._steps += 1
        if self._callbacks is not None:
            self._callbacks.stepped(self._steps)
        return loss

    def finish(self) -> list[Tensor]:
        """Take back and push all that is under way; an epoch's end has done so. Answers losses that no step has.

        All stages of a replica call it.
        """
        loop = self._epochs.loop
        if loop is None:
            return []
        loop.finish()
        losses, loop.losses = loop.losses, []
        return losses

    @property
    def delay(self) -> int:
        """Updates of this stage by its own replica between a batch's forward pass and the update by its gradient."""
        return max(self._stage.program.delays, default=0)

    def detach(self) -> None:
        """End the servers: every stage has its final weights. All ranks call it; it waits for all."""
        if self._callbacks is not None:
            self._callbacks.finish()
        self._epochs.leave()
        self.loop_log.close()

    # ------------------------------------------------------------------ callbacks

    def asked(self) -> Control:
        """Rank 0's requests since the last call, on rank 0 alone. A request to stop reaches all ranks (`stopped`)."""
        asked = Control() if self._callbacks is None else self._callbacks.asked()
        return asked._replace(stop=self.stopped)

    @property
    def stopped(self) -> bool:
        """True once a callback has asked for the end and every batch that was dealt is in the model; `pt.shard` ends
        there, on all ranks."""
        return self._epochs.loop is not None and self._epochs.loop.stopped

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Give callbacks the loop's own scores (`on_evaluation`); rank 0's count."""
        if self._callbacks is not None and self._world.rank == 0:
            self._callbacks.evaluated(values)

    # ------------------------------------------------------------------ the account

    @property
    def account(self) -> dict[str, Any] | None:
        """The account of the run, on rank 0 after `detach`: ledger of samples, staleness of gradients, ends of
        processes.
        """
        return self._epochs.account

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model as the servers have it, by its own names, on all ranks. Between epochs, all ranks call it."""
        loop = self._between_epochs("state_dict")
        if loop is None:
            return self._whole.state_dict()
        with loop.replica.lent(loop.servers()):
            found = loop.whole()
        names = {id(p): name for name, p in self._whole.named_parameters()}
        every = {n: found[names[id(p)]] for n, p in self._whole.named_parameters(remove_duplicate=False)}
        every |= {name: found.get(name, buffer) for name, buffer in self._whole.named_buffers()}
        self._world.drive(barrier(self._world.port))  # no replica trains on while another pulls
        return {name: every[name] for name in self._whole.state_dict() if name in every}

    def training_state(self) -> dict[str, Any]:
        """The state that a new loop needs to go on after the last epoch, for `torch.save`. All ranks call it, between
        epochs.

        Rank 0's part has the servers' state: weights, momentum, versions, tickets; save the position of `pt.shard` with
        it. The ranks' own state (the momentum of `downpour`'s own steps, residuals of codecs, estimators of gradients)
        begins again, as in a resumed job. Memory on rank 0: all shards' states.
        """
        loop = self._between_epochs("training_state")
        if loop is None or self._epochs.batches is None:
            raise ValueError(f"there is no training state before the first epoch: {_NONE_YET}")
        state: dict[str, Any] = {"of": self._identity, "epochs": self._epochs_done, "generation": self._generation}
        state["batches"] = len(self._epochs.batches)
        if self._world.rank == 0:
            state["shards"] = loop.states()
        state["callbacks"] = [self._steps, "" if self._callbacks is None else self._callbacks.state()]
        self._world.drive(barrier(self._world.port))  # no replica trains on before the states are there
        return state

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `training_state`, before the first epoch.

        Errors: ValueError where it was saved by another rank, schedule, cut or strategy.
        """
        if self._epochs.loop is not None:
            raise ValueError("the servers have begun; load the training state before the first epoch of pt.shard")
        theirs, mine = state["of"], self._identity
        if others := [f"{name} {theirs.get(name)!r}" for name, own in mine.items() if theirs.get(name) != own]:
            raise ValueError(
                f"the state was saved by a pipeline with {', '.join(others)}, and this one differs; make it as it was, "
                "or load state_dict() of the saved one into the model before it is cut"
            )
        self._resumed = state
        self._steps, states = state.get("callbacks", (0, ""))
        self.loop_log.resumed(self._steps)
        if self._callbacks is not None and states:
            self._callbacks.restore(states, self._steps)

    @property
    def _epochs_done(self) -> int:
        """The epochs of the run, with the epochs before it was resumed."""
        before = 0 if self._resumed is None else int(self._resumed["epochs"])
        return before + self._epochs.done

    @property
    def _generation(self) -> int:
        return 0 if self._resumed is None else int(self._resumed["generation"]) + 1

    @property
    def _identity(self) -> dict[str, Any]:
        """The facts that a state of this rank must have."""
        return self._told | {"rank": self._world.rank, "ranks": self._world.size}

    def _between_epochs(self, what: str) -> TicketLoop | None:
        if self._epochs.within:
            raise ValueError(
                f"{what}() within an epoch: replicas are at other batches, and the servers deal on; call it between "
                "epochs, on all ranks"
            )
        return self._epochs.loop

    # ------------------------------------------------------------------ the beginning

    def _join(self, shard: DataShard, batches: Batches) -> JoinedLoop:
        world, facts = self._world, self._facts(shard, batches)
        link = self._start.link(world, facts)
        stage = self._stage
        loop = TicketLoop(world.rank, facts, self.model, self.optimizer, self._strategy, link, stage=stage)
        return JoinedLoop(loop, link)

    def _facts(self, shard: DataShard, batches: Batches) -> LoopFacts:
        resumed, stages = self._resumed, self._stages.facts
        if resumed is not None and resumed["batches"] != len(batches):
            raise ValueError(
                f"the saved run has {resumed['batches']} batches an epoch, and this one {len(batches)}; go on with the "
                "same data, batch size and number of replicas"
            )
        shards = () if resumed is None or self._world.rank else resumed["shards"]
        facts = facts_of_loop(
            self._whole,
            self._optimizer,
            self._between,
            hosts=tuple(self._world.port.hosts),
            batches_per_epoch=len(batches),
            timeout_s=self._epochs.timeout_s,
            allow_nan=True,
            first_epoch=shard.epoch,
            servers=0 if self._world.servers is None else len(self._world.servers.ranks),
        )
        return replace(
            facts,
            stages=stages.planned,
            running=stages.running,
            passed_bytes=stages.most_bytes,
            states=tuple(each.numpy().tobytes() for each in shards),
            epochs_done=self._epochs_done,
            generation=self._generation,
        )

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """All stages of a replica read the same batch, also where that draws random numbers."""
        with kept_random_states():
            seed_step(self._seed, 0, number, "data")
            yield


def _pair(batch: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    return tuple(batch[:-1]), batch[-1]


def _check(
    world: ProcessWorld, model: nn.Module, optimizer: Optimizer, strategy: Strategy, max_norm: float | None
) -> None:
    """ValueError for features that stages with servers cannot have in a loop of one's own."""
    assert strategy.server is not None
    check_service(strategy.server)
    check_served(model, optimizer, strategy, strategy.features - {"stages"})
    stages = schedule_of(strategy).stages
    if world.size % stages:
        raise ValueError(
            f"{world.size} ranks cannot be replicas of {stages} stages each; start {-(-world.size // stages) * stages}"
        )
    if world.port.mesh is not None:
        raise ValueError(
            f"this world is a {world.port.mesh}, and with parameter servers rank r is stage r // D of replica r mod D; "
            "leave out pt.init(mesh=…)"
        )
    if max_norm is not None:
        refuse(strategy.features | {"pipeline", "max_norm"}, strategy=strategy, max_norm=max_norm)
    if world.life > 1:
        raise ValueError(
            f"rank {world.rank} has been started again, and the others of the {stages} ranks that held its model with "
            "it have not; start all ranks again, and load the last training_state()"
        )
    if world.epoch_source is not None:
        raise ValueError(
            "another model is attached with a parameter server, which deals the batches; call detach() on it first"
        )
