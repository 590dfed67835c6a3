"""`attach_by_log`: hooks on the loop of a worker that pushes movements into an object store, each when it is ready.

push_movement(10)    ──▶    the movement is an entry of the run's log (`worlds.object_store.store_log`)
                            each worker applies all entries to a copy of the shard: one server, and no process for it

A push by `async_diloco` waits for no other worker. By `decoupled_diloco` it waits for its quorum, and leaves out
workers without an entry for `wait_s`. The end of a grace window is an entry, too: the first waiting worker makes it,
by its own clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from polytempo.core import Bundle, Op, Port, Strategy, Transform
from polytempo.core.calls.refusals import refuse
from polytempo.core.driver import interpreted
from polytempo.core.errors import PolytempoError
from polytempo.core.op import Pull, Push, Start, Work
from polytempo.core.strategy import ByMessages
from polytempo.data.shard import DataShard
from polytempo.server.layout import Span
from polytempo.server.message import COORDINATOR, Elapsed, Members, Pushed, Reply
from polytempo.server.message import Push as PushMessage
from polytempo.server.shard.shard import Shard
from polytempo.server.worker.encoded_pushes import EncodedPushes, encoded
from polytempo.server.worker.transforms import Moving
from polytempo.training.hooks.attach import AttachOptions, attach_alike
from polytempo.training.hooks.handle import Handle
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.own_loop.store_places import StorePlaces
from polytempo.training.served.shard_rule import flat_of, parameters_of, shard_rule_of
from polytempo.worlds.object_store.object_store import PatientLooks, StoredObject, packed
from polytempo.worlds.object_store.store_log import Fallen, LogEntry, StoreLog
from polytempo.worlds.object_store.store_world import StoreWorld

_SAVED = 10
"""A worker's entries between two states in the store."""


def pushes_movements(strategy: Strategy) -> bool:
    """True for a server of workers that push a movement now and then and go on from one model.

    `Incompatible` (PT2914) for encoded pulls.
    """
    service = strategy.server
    layout = Bundle({"w": torch.zeros(2, 2)})
    if service is None or service.rule.region_size or not isinstance(strategy.parameters.init(layout), Moving):
        return False
    if service.pull_codec is not None:
        refuse({"object store", "encoded pulls"}, strategy=strategy, codec=service.pull_codec.facts.name)
    return True


def attach_by_log(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, facts: str, *, world: StoreWorld, options: AttachOptions
) -> Handle:
    """Attach a strategy of workers that push movements. It begins with the first worker's parameters, or the newest."""
    normed = [name for name, each in model.named_modules() if isinstance(each, _NormBase) and each.track_running_stats]
    if normed and options.buffers != "leave":
        refuse({"object store", "movements of statistics"}, strategy=strategy, name=normed[0])
    loop = LogLoop(world, model, optimizer, strategy, facts)
    own = replace(strategy, meeting=ByMessages(), parameters=loop.through_log(strategy.parameters), synchronized=False)
    handle = attach_alike(model, optimizer, own, world=world, options=options)
    world.follows, world.parting, world.pulled = loop, loop.leave, loop.answered
    handle.on_step(loop.stepped)
    handle.on_loaded(partial(refuse, {"object store", "loaded parameters"}, strategy=strategy))
    return handle


class LogState(NamedTuple):
    """The transform's state, the process that it is of, and the worker's pushes so far.

    Where a later process loads it, movements are counted from the log's parameters. The residual of a codec stays only
    if it is of the worker's last push: a later one has sent it.
    """

    life: int
    pushes: int
    inner: Any


class LogLoop:
    """One worker's loop, and its copy of the server."""

    def __init__(
        self, world: StoreWorld, model: nn.Module, optimizer: Optimizer, strategy: Strategy, facts: str
    ) -> None:
        rounds, service = world.rounds, strategy.server
        assert service is not None, "pushes_movements has seen to it"
        self._rounds, self._worker, self._model = rounds, rounds.worker, model
        self._life = crc32(rounds.life.encode())
        rounds.facts = facts
        weights = rounds.begin_alike(({"weights": flat_of(model, optimizer)}, {}))
        assert weights is not None, "no decision of a round is in this place"
        parameters = parameters_of(model, optimizer, strategy)
        self._lrs = (1.0,) * (1 + max(each.group for each in parameters))
        """Rates of the worker's groups; the server has one of its own."""
        start = weights.tensors["weights"]
        service = replace(service, optimizer=shard_rule_of(service, optimizer))
        self._shard = Shard(0, parameters, (Span(0, start.numel()),), start, service, native=False)
        self._members = dict.fromkeys(range(rounds.workers), 1)
        self._lives: dict[int, str] = {}
        """The newest process of each worker; entries of others are too late."""
        self._sequences: Counter[int] = Counter()
        self._waiting: set[int] = set()
        """The workers with a push that is not in the parameters yet."""
        self._ledger: dict[str, dict[str, Any]] = {}
        self._unnamed: list[str] = []
        """Movements of processes that this worker's next entry ends."""
        self._basis = 0
        self._answer: Tensor | None = None
        self._window: tuple[int, float] | None = None
        """The version at which a grace window opened, and its end."""
        self._left_out = self._met = False
        self._places = StorePlaces(lambda: self._ledger.get(str(self._worker), {}), self._trains)
        self._log = StoreLog(rounds.store, self._apply, self._dump, save_every=_SAVED * rounds.workers)
        self._change_members()
        self._come()
        values = list(trainable(model, optimizer).values())
        with torch.no_grad():
            for value, part in zip(values, self.answered().split([v.numel() for v in values]), strict=True):
                value.copy_(part.view_as(value))

    # ------------------------------------------------------------------ the transform

    def through_log(self, transform: Transform) -> Transform:
        """`transform` with its pushes, encoded, and pulls in the log."""
        transform = encoded(transform, self._shard.service.codec, lambda worker: self._sequences[worker] + 1)

        def init(parameters: Bundle) -> LogState:
            return LogState(self._life, self._pushes, transform.init(parameters))

        async def apply(port: Port, bundle: Bundle, state: LogState) -> tuple[Bundle | None, LogState]:
            inner = state.inner
            if (state.life, state.pushes) != (self._life, self._pushes):  # it was loaded: the log may have gone on
                inner = transform.init(bundle.with_flat(self.answered().to(bundle.flat)))
                if isinstance(inner, EncodedPushes) and state.pushes == self._pushes:
                    inner = inner._replace(codec=state.inner.codec)
            work = transform.apply(port, bundle, inner)
            answer, inner = await interpreted(work, self._performed, (Push, Pull, Start, Work))
            return answer, LogState(self._life, self._pushes, inner)

        return transform._replace(init=init, apply=apply)

    @property
    def _pushes(self) -> int:
        """This worker's pushes in the log, of all its processes."""
        return self._sequences[self._worker]

    async def _performed(self, op: Op[Any]) -> Any:
        match op:
            case Push():
                return self._push(op)
            case Start(Push() as push):
                return Work(self._push(push))
            case Start(Pull() as pull):
                return Work(pull)
            case Work(bool()):
                return None
            case Pull():
                return self.answered()
        return await op

    def _push(self, push: Push) -> bool:
        """Append a movement; False where the others have gone on without this worker."""
        self._met = True
        movement = push.gradient.detach().to("cpu", copy=True)

        def entry() -> dict[str, Any] | None:
            if not self._takes_part:
                return None
            self._answer = None
            mine = self._places.present()
            samples = mine["samples"] - int(self._ledger.get(str(self._worker), {}).get("samples", 0))
            facts = {"clock": push.clock, "basis": self._basis, "samples": samples, "life": self._rounds.life}
            return {"kind": "push", "worker": self._worker, "mine": mine, **facts}

        name = self._next_movement(self._worker)
        counts = self._current(lambda: self._log.append(entry, movement, name))
        if not counts:
            self._left_out = True
            self._come()
        self._window_end(self._rounds.store.clock.now())
        return counts

    def answered(self) -> Tensor:
        """The parameters that this worker goes on from, once its push is in them."""
        clock, looks = self._rounds.store.clock, PatientLooks(self._rounds.store)
        from_s = since_s = clock.now()
        while self._answer is None:
            now_s = clock.now()
            ends_s = self._window_end(now_s)
            if not self._takes_part:  # others went on, and have this worker's push
                self._come()
            elif self._current(self._log.catch_up):
                since_s = now_s
            elif ends_s is not None and now_s >= ends_s:
                self._current(partial(self._log.append, partial(self._elapsed, self._shard.version)))
            elif now_s - from_s > self._rounds.timeout_s:
                self._rounds.fail("makes an entry")
            elif ends_s is None and now_s - since_s > self._rounds.wait_s:
                if self._current(lambda: self._log.append(self._absent)):
                    self._remove_unnamed()
                since_s = now_s
            else:
                looks.pause(since_s + self._rounds.wait_s if ends_s is None else ends_s)
        return self._answer

    def _window_end(self, now_s: float) -> float | None:
        """The time when the open grace window ends, which this worker sees open first now or saw so before."""
        window_s, version = self._shard.window_s, self._shard.version
        if window_s is None:
            self._window = None
        elif self._window is None or self._window[0] != version:
            self._window = version, now_s + window_s
        return None if self._window is None else self._window[1]

    def _elapsed(self, version: int) -> dict[str, Any] | None:
        """End the window that opened at `version`, unless another entry has."""
        is_open = self._shard.window_s is not None and self._shard.version == version
        return {"kind": "elapsed", "version": version} if is_open else None

    def _comes(self) -> dict[str, Any] | None:
        """Be a member, in this process's life."""
        known = self._worker in self._members and self._worker in self._lives
        self._unnamed = [self._next_movement(self._worker)] if known else []
        comes = {"kind": "comes", "workers": [self._worker], "life": self._rounds.life}
        return None if self._takes_part else comes

    def _absent(self) -> dict[str, Any] | None:
        """Leave out the workers that others wait for."""
        gone = sorted(set(self._members) - self._waiting - {self._worker})
        self._unnamed = [self._next_movement(worker) for worker in gone]
        return {"kind": "left", "workers": gone} if gone and self._answer is None else None

    def _next_movement(self, worker: int) -> str:
        """The name of a worker's next movement: no later process of it has the same, nor it when it comes again."""
        life, member, number = self._lives.get(worker), self._members.get(worker), self._sequences[worker]
        return f"moved/{worker}-{life}-{member}-{number}"

    def _remove_unnamed(self) -> None:
        """Remove movements that lost processes may have put. By this worker's last entry no other will name them."""
        for name in self._unnamed:
            self._rounds.store.remove(name)

    def _current(self, work: Callable[[], bool]) -> bool:
        """The answer of `work`, from a newer state where this worker has fallen behind."""
        while True:
            try:
                return work()
            except Fallen:
                self._load()

    # ------------------------------------------------------------------ steps and data

    def stepped(self, step: int) -> None:
        """The optimizer's step is done, and the push in it, if there was one."""
        met, self._met = self._met, False
        if self._left_out:
            self._left_out = False
            self._places.rewind()
        elif met:
            self._places.count()

    def rewound(self, shard: DataShard) -> bool:
        """True if the shard has just gone to where the log stands; it is asked before each batch."""
        return self._places.rewound(shard)

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self._model.training

    def leave(self, *, done: bool = True) -> None:
        """Tell the others not to wait for this worker, once its last push is in the parameters."""
        if done and self._takes_part and self._worker in self._waiting:
            self.answered()
        left = {"kind": "left", "workers": [self._worker], "life": self._rounds.life}
        self._current(lambda: self._log.append(lambda: left if self._takes_part else None))

    def _come(self) -> None:
        """Take over the newest parameters, and be a member."""
        self._load()
        if self._current(lambda: self._log.append(self._comes)):
            self._remove_unnamed()
        if self._worker not in self._waiting:
            self._take()
        if str(self._worker) in self._ledger:
            self._places.rewind()

    # ------------------------------------------------------------------ the copy of the server

    @property
    def _takes_part(self) -> bool:
        return self._worker in self._members and self._lives.get(self._worker) == self._rounds.life

    def _take(self) -> None:
        """Answer with the present parameters, which later entries do not change."""
        self._answer, self._basis = self._shard.weights.clone(), self._shard.version

    def _apply(self, entry: LogEntry) -> None:
        about = entry.about
        if about["kind"] == "elapsed":
            return self._heard(self._shard.apply(Elapsed(about["version"])))
        if about["kind"] != "push":
            for worker in about["workers"]:
                if about["kind"] == "left":
                    self._waiting.discard(worker)
                    self._members.pop(worker, None)
                else:
                    self._lives[worker] = about["life"]
                    self._members.setdefault(worker, self._log.next + 2)
            return self._change_members()
        worker = int(about["worker"])
        self._ledger[str(worker)] = about["mine"] | {"entry": self._log.next}
        self._sequences[worker] += 1
        self._waiting.add(worker)
        assert entry.movement is not None, "a push has one"
        push = PushMessage(
            worker,
            self._members[worker],
            self._sequences[worker],
            clock=about["clock"],
            basis=about["basis"],
            samples=about["samples"],
            lrs=self._lrs,
            tickets=(),
            gradient=entry.movement,
        )
        self._heard(self._shard.apply(push))

    def _change_members(self) -> None:
        self._sequences[COORDINATOR] += 1
        members = tuple(sorted(self._members.items()))
        self._heard(self._shard.apply(Members(COORDINATOR, 1, self._sequences[COORDINATOR], members)))

    def _heard(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if not isinstance(reply, Pushed):
                continue
            self._waiting.discard(reply.worker)
            if reply.worker == self._worker:
                if reply.verdict == "refused":
                    raise PolytempoError(reply.reason)
                self._take()

    def _dump(self) -> bytes:
        data, tensors = self._shard.dump()
        named = {str(number): tensor for number, tensor in enumerate(tensors)}
        state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        about = {
            "members": sorted(self._members.items()),
            "sequences": sorted(self._sequences.items()),
            "waiting": sorted(self._waiting),
            "lives": sorted(self._lives.items()),
            "ledger": self._ledger,
        }
        return packed({"state": state, **named}, about)

    def _load(self) -> None:
        """Go on from the newest state, if there is one, and read the log to its end."""
        looks, until_s = PatientLooks(self._rounds.store), self._rounds.store.clock.now() + self._rounds.timeout_s
        while True:
            if (found := self._log.newest()) is not None:
                self._restore(found)
            try:
                self._log.catch_up()
                if self._takes_part and self._worker not in self._waiting:
                    self._take()  # the answer to a push that the state has
                return
            except Fallen:
                if self._rounds.store.clock.now() > until_s:
                    raise
                looks.pause(until_s)

    def _restore(self, found: StoredObject) -> None:
        tensors = [found.tensors[str(number)] for number in range(len(found.tensors) - 1)]
        self._shard.load(found.tensors["state"].numpy().tobytes(), tensors)
        about = found.about
        self._members, self._sequences = dict(about["members"]), Counter(dict(about["sequences"]))
        self._waiting, self._lives, self._ledger = set(about["waiting"]), dict(about["lives"]), dict(about["ledger"])
