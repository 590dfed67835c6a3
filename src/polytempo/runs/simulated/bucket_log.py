"""The log of movements of a simulated run on a cluster `in_bucket`: requests of `worlds.object_store.store_log`.

push_movement(10)    ──▶    put the movement │ read the others' entries and movements │ create an entry, or read on

All copies of the server are equal, so one of them applies each entry when it is created. A worker has its answer when
it has read the log up to that entry. With a delay it reads while it computes, where a real worker reads when it takes
the answer in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from polytempo.core import Bundle, PolytempoError, Port, State, Transform
from polytempo.core.driver import interpreted
from polytempo.core.op import Op, Pull, Push, Start, Work
from polytempo.core.rule import Service
from polytempo.core.state import settled
from polytempo.server.layout import Parameter, Span, plain_empty, without_values
from polytempo.server.message import COORDINATOR, Elapsed, Entry, Members, Pushed
from polytempo.server.message import Push as PushMessage
from polytempo.server.shard.shard import Shard
from polytempo.server.worker.encoded_pushes import encoded, inner_state
from polytempo.server.worker.transforms import Moving
from polytempo.worlds.object_store.object_store import FIRST_PAUSE_S, LONGEST_PAUSE_S
from polytempo.worlds.object_store.round_cost import RequestSeries

_WAIT_S = 60.0
"""Seconds without an entry until a worker leaves out the workers that it waits for; the default of `join_bucket`."""


class SimulatedLog:
    """The log of one run, and its copy of the server. `steps`: workers leave after so many; None: after `_WAIT_S`."""

    def __init__(self, service: Service, workers: int, steps: int | None) -> None:
        self._service, self._steps = service, steps
        self._shard: Shard | None = None
        self._movements: list[int] = []
        """Bytes of each entry's movement; 0: it has none."""
        self._read = [0] * workers
        """Entries that each worker has read."""
        self._members = dict.fromkeys(range(workers), 1)
        self._sequences: Counter[int] = Counter()
        self._waiting: set[int] = set()
        """Workers with a push that is not in the parameters yet."""
        self._answers: dict[int, tuple[int, Tensor]] = {}
        """Entries up to each worker's answer, and the answer."""
        self._bases = [0] * workers

    def through_log(self, transform: Transform) -> Transform:
        """`transform` with its pushes, encoded, and pulls in the log."""
        transform = encoded(transform, self._service.codec, lambda worker: self._sequences[worker] + 1)

        async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
            async def performed(op: Op[Any]) -> Any:
                match op:
                    case Push():
                        return await self._push(port.world_rank, op)
                    case Start(Push() as push):
                        return Work(await self._push(port.world_rank, push))
                    case Start(Pull()):
                        return await port.start(self._answered(port))
                    case Work(bool()):
                        return None
                    case Pull():
                        return await self._answered(port)
                return await op

            self._copy(_moving(state).anchor)
            given = transform.apply(port, bundle, state)
            answer, state = await interpreted(given, performed, (Push, Pull, Start, Work))
            if (moved := _moving(state)).step == self._steps:
                if port.world_rank in self._waiting:
                    await settled(moved.coming)
                await self._append(port.world_rank, lambda: self._without({port.world_rank}))
            return answer, state

        return transform._replace(apply=apply)

    # ------------------------------------------------------------------ a worker's requests

    async def _push(self, worker: int, push: Push) -> bool:
        """Append a movement; False where the others have gone on without the worker."""
        movement = push.gradient.detach().clone()
        self._answers.pop(worker, None)
        await RequestSeries(members=(worker,), puts=1, sent_bytes=movement.nbytes)

        def entry() -> Entry | None:
            if worker not in self._members:  # the others went on without it
                return None
            return PushMessage(
                worker,
                self._members[worker],
                self._sequences[worker] + 1,
                clock=push.clock,
                basis=self._bases[worker],
                samples=1,
                lrs=(1.0,),
                tickets=(),
                gradient=movement,
            )

        counts = await self._append(worker, entry, movement.nbytes)
        if not counts:
            life, shard = len(self._movements) + 2, self._copy()
            await self._append(worker, lambda: self._set_of(self._members | {worker: life}))
            self._bases[worker], self._answers[worker] = shard.version, (len(self._movements), shard.weights.clone())
        return counts

    async def _answered(self, port: Port) -> Tensor:
        """The parameters that a worker goes on from, once its push is in them; as `LogLoop`'s."""
        worker, pause_s, since_s = port.world_rank, FIRST_PAUSE_S, await port.now()
        shard, window = self._copy(), None
        while worker not in self._answers or self._read[worker] < self._answers[worker][0]:
            if worker not in self._members:  # it has left, or the others have gone on without it
                return shard.weights.clone()
            before = self._read[worker]
            await self._catch_up(worker)
            now_s, window_s = await port.now(), shard.window_s
            if window_s is None:
                window = None
            elif window is None or window[0] != shard.version:
                window = shard.version, now_s + window_s
            if self._read[worker] > before:
                since_s = now_s
            elif window is not None and now_s >= window[1]:
                await self._append(worker, partial(self._elapsed, window[0]))
            elif window is None and now_s - since_s > _WAIT_S:
                await self._append(worker, partial(self._absent, worker))
                since_s = now_s
            else:
                ends_s = since_s + _WAIT_S if window is None else window[1]
                await port.take(max(1e-3, min(pause_s, ends_s - now_s)))
                pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        return self._answers[worker][1]

    async def _catch_up(self, worker: int) -> None:
        """Read the entries so far, with their movements, and look for one more."""
        end = -1
        while end < len(self._movements):
            end = len(self._movements)
            sizes = self._movements[self._read[worker] : end]
            gets = len(sizes) + sum(size > 0 for size in sizes) + 1
            await RequestSeries(members=(worker,), gets=gets, received_bytes=sum(sizes))
            self._read[worker] = max(end, self._read[worker])

    async def _append(self, worker: int, make: Callable[[], Entry | None], num_bytes: int = 0) -> bool:
        """Append `make()`, which is asked after the entries so far; False where it is None: there is nothing to do."""
        while True:
            await self._catch_up(worker)
            if (entry := make()) is None:
                return False
            await RequestSeries(members=(worker,), puts=1)
            if self._read[worker] == len(self._movements):  # no other worker was first
                break
        self._movements.append(num_bytes)
        self._read[worker] = len(self._movements)
        self._apply(entry)
        return True

    # ------------------------------------------------------------------ the copy of the server

    def _copy(self, start: Bundle | None = None) -> Shard:
        if self._shard is None:
            assert start is not None, "each step gives it"
            named = start.tensors.items()
            parameters = tuple(Parameter(name, value.numel(), shape=tuple(value.shape)) for name, value in named)
            spans, weights, meta = (Span(0, start.flat.numel()),), start.flat.detach().clone(), start.flat.is_meta
            service = replace(
                self._service, allow_nan=self._service.allow_nan or meta
            )  # without values none is looked at
            empty = without_values if meta else plain_empty
            self._shard = Shard(0, parameters, spans, weights, service, empty=empty, native=False)
            self._apply(self._set_of(self._members))
        return self._shard

    def _set_of(self, members: Mapping[int, int]) -> Members:
        return Members(COORDINATOR, 1, self._sequences[COORDINATOR] + 1, tuple(sorted(members.items())))

    def _without(self, workers: Collection[int]) -> Members | None:
        left = {worker: life for worker, life in self._members.items() if worker not in workers}
        return None if left == self._members else self._set_of(left)

    def _absent(self, worker: int) -> Members | None:
        """Leave out the workers that `worker` waits for."""
        return None if worker in self._answers else self._without(set(self._members) - self._waiting - {worker})

    def _elapsed(self, version: int) -> Elapsed | None:
        shard = self._copy()
        return Elapsed(version) if shard.window_s is not None and shard.version == version else None

    def _apply(self, entry: Entry) -> None:
        shard = self._copy()
        if isinstance(entry, Members):
            came = dict(entry.members).keys() - self._members.keys()
            self._members, self._sequences[COORDINATOR] = dict(entry.members), entry.sequence
            self._sequences.update(dict.fromkeys(came, 0))
            self._waiting &= self._members.keys()
        elif isinstance(entry, PushMessage):
            self._sequences[entry.worker] = entry.sequence
            self._waiting.add(entry.worker)
        for reply in shard.apply(entry):
            if isinstance(reply, Pushed):
                if reply.verdict == "refused":
                    raise PolytempoError(reply.reason)
                self._waiting.discard(reply.worker)
                self._bases[reply.worker] = shard.version
                self._answers[reply.worker] = len(self._movements), shard.weights.clone()


def _moving(state: State) -> Moving:
    moving = inner_state(state)
    assert isinstance(moving, Moving), "`pushes_movements` has seen to it"
    return moving
