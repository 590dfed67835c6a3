"""`attach_in_store`: hooks on the loop of a worker that meets others in an object store (`worlds.object_store`).

every(100, t)    ──▶    every(100, in_rounds(t))        t: mean, mean and outer step, compressed mean, …

step 100   meet: who is there? ── t over a port of the present ones ── buffers ── state for workers that join
              ╰── left out: wait for the newest state, take it over, go back to the first sample that no round counts
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import polytempo
from polytempo.core import Bundle, Port, Promise, State, Strategy, Transform, averaging, is_idle, native, world_port
from polytempo.core.calls.refusals import refuse
from polytempo.core.driver import WAITING, Task
from polytempo.core.op import Collective, Compute, Now, Op, Program
from polytempo.core.state import Saved, duplicate
from polytempo.data.shard import DataShard
from polytempo.synchronization.every import Timed
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.elastic.elastic_strategies import check_elastic
from polytempo.training.hooks.attach import AttachOptions, attach_alike, check_attachable, check_options
from polytempo.training.hooks.handle import Handle
from polytempo.training.model.requirements import fitted
from polytempo.training.own_loop.store_log_loop import attach_by_log, pushes_movements
from polytempo.training.own_loop.store_places import StorePlaces
from polytempo.training.step.replica import Replica
from polytempo.worlds.object_store.rounds import MissedRound, RoundBroken, StoreRounds
from polytempo.worlds.object_store.store_world import StoreWorld

T = TypeVar("T")


def attach_in_store(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, *, world: StoreWorld, options: AttachOptions
) -> Handle:
    """Attach a strategy of rare exchanges to a worker's loop. It begins with the others' state.

    Errors: `Incompatible` (PT29xx, PT12xx) for strategies and options that do not fit, `Mismatch` for a run of another
    strategy or model.
    """
    check_attachable(model, optimizer, strategy)
    check_options(model, optimizer, strategy, options)
    asked = {
        "callbacks": bool(options.callbacks),
        "noise scale": options.noise_scale is not None,
        "buffers": options.buffers == "broadcast",
        "scaler": options.scaler is not None and options.scaler.is_enabled(),
    }
    if world.follows is not None:
        refuse({"object store", "several models"})
    for option in (name for name, has in asked.items() if has):
        refuse({"object store", option})
    facts = f"{_facts(model, strategy)}, with workers={world.size}"
    if pushes_movements(strategy):
        return attach_by_log(model, optimizer, strategy, facts, world=world, options=options)
    timed = check_rare(strategy, optimizer)
    loop = StoreLoop(world.rounds)
    own = replace(strategy, parameters=timed.around(loop.in_rounds))
    handle = attach_alike(model, optimizer, own, world=world, options=options)
    loop.begin(handle, facts)
    world.follows = loop
    handle.on_step(loop.stepped)
    return handle


def check_rare(strategy: Strategy, optimizer: Optimizer) -> Timed:
    """The strategy's meetings. `Incompatible` where they are not rare, or need messages between two workers."""
    features = strategy.features & {"server", "slices", "rounds", "stages", "parts", "groups", "one copy"}
    timed = fitted(strategy, optimizer).parameters.apply
    often = not isinstance(timed, Timed) or timed.period == 1 or not is_idle(strategy.gradients, 2)
    if features or often:
        refuse({"object store", "every step"}, strategy=strategy)
    assert isinstance(timed, Timed)
    check_elastic(strategy)
    if strategy.carries_optimizer:
        refuse({"object store", "optimizer state"}, strategy=strategy)
    layout = Bundle({"w": torch.zeros(2, 2)})
    first = _first_operation(timed.transform.apply(world_port(0, (0, 1)), layout, timed.transform.init(layout)))
    if not isinstance(first, Collective) or len(first.members) != 2:
        refuse({"object store", "messages"}, what=f"{strategy}: {first}")
    return timed


def _first_operation(program: Program[Any]) -> Op[Any] | None:
    """The first operation of a program that reaches other ranks."""
    found: list[Op[Any]] = []

    def begin(op: Op[Any]) -> Any:
        match op:
            case Compute(work, _):
                return work()
            case Now():
                return 0.0
        found.append(op)
        return WAITING

    try:
        Task(program).resume(begin)
    finally:
        program.close()
    return found[0] if found else None


def _facts(model: nn.Module, strategy: Strategy) -> str:
    layout = {name: [list(t.shape), str(t.dtype)] for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    digest = hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:12]
    return f"{strategy}, Polytempo {polytempo.__version__}, a {type(model).__name__} of layout {digest}"


class StoreLoop:
    """One worker's loop: its rounds, its state for others, and its position in the data."""

    def __init__(self, rounds: StoreRounds) -> None:
        self._rounds = rounds
        self._replica: Replica | None = None
        self._places = StorePlaces(lambda: rounds.ledger.get(str(rounds.worker), {}), self._trains)
        self._left_out = self._met = False

    # ------------------------------------------------------------------ the transform

    def in_rounds(self, transform: Transform) -> Transform:
        """`transform` among those workers that are there."""
        average = transform.beside or averaging(native)

        async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
            rounds = self._rounds
            self._met = True

            async def exchanged(group: Port) -> tuple[Bundle | None, State]:
                given = bundle.copy()
                answer, after = await transform.apply(group, given, duplicate(state))
                return (bundle if answer is given else answer), after

            try:
                rounds.begin(self._places.present())
                found = await self._tried(port, exchanged)
            except MissedRound:
                self._left_out = True
                return bundle, state
            rounds.keep()
            return found

        async def beside(port: Port, bundle: Bundle, state: State) -> Bundle:
            if self._left_out:
                return bundle
            try:
                return await self._tried(port, lambda group: average(group, bundle.copy(), state))
            except MissedRound:
                self._left_out = True
                return bundle

        kept = transform.promises & Promise.WEIGHS
        return Transform(transform.init, apply, kept, transform.cost, beside)

    async def _tried(self, port: Port, exchange: Callable[[Port], Awaitable[T]]) -> T:
        while True:
            try:
                return await exchange(port.among(self._rounds.members))
            except RoundBroken:
                self._again()

    def _again(self) -> None:
        while True:
            try:
                return self._rounds.again()
            except RoundBroken:
                continue

    # ------------------------------------------------------------------ steps

    def begin(self, handle: Handle, facts: str) -> None:
        """Take over the state that all begin with, or the newest one."""
        self._replica, self._rounds.facts, self._rounds.state = handle.replica, facts, self._state
        start = self._rounds.begin_alike(self._state())
        if start is None:
            self._join()
        else:
            self._take(start.tensors, start.about)
        self._rounds.begun = True

    def stepped(self, step: int) -> None:
        """The optimizer's step is done, and the round in it, if there was one."""
        met, self._met = self._met, False
        if self._left_out:
            self._left_out = False
            self._join()
        elif met:
            self._places.count()
            if self._rounds.worker == min(self._rounds.members):
                for token in self._rounds.newcomers.values():
                    self._rounds.give(token, *self._state())
        self._rounds.inside = False

    # ------------------------------------------------------------------ data

    def rewound(self, shard: DataShard) -> bool:
        """True if the shard has just gone to where the rounds stand; it is asked before each batch."""
        return self._places.rewound(shard)

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self._replica is not None and self._replica.model.training

    # ------------------------------------------------------------------ state

    def _join(self) -> None:
        given = self._rounds.join()
        self._take(given.tensors, given.about)
        self._places.rewind()

    @torch.no_grad()
    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Model, optimizer and strategy state, for a worker that has none."""
        replica = self._replica
        assert replica is not None
        with replica.in_float32():
            optimizer, strategy = optimizer_saved(replica.optimizer), replica.state()
            parts = {"model": Saved(replica.tensors(), {}), "strategy": strategy, "": optimizer}
            tensors = {f"{part}/{n}": t for part, saved in parts.items() for n, t in saved.tensors.items()}
            scalars = {f"{part}/{n}": value for part, saved in parts.items() for n, value in saved.scalars.items()}
            return tensors, scalars

    @torch.no_grad()
    def _take(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Take over a result of `_state`. This worker keeps its own residuals, which no one else has."""
        replica = self._replica
        assert replica is not None
        given, residuals = Saved(tensors, about), replica.state()
        with replica.in_float32():
            for name, tensor in replica.tensors().items():
                tensor.copy_(given.tensors[f"model/{name}"])
            optimizer_restore(replica.optimizer, given.under(""))
        replica.restore(given.under("strategy"), [residuals])
