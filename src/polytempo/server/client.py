"""`Client`: a worker's side of the parameter server, without I/O.

push(flat) ─▶ one Push for each shard ─▶ … ─▶ every shard has answered: the push is done
pull()     ─▶ one Pull for each shard ─▶ … ─▶ the parts, copied together into one flat vector
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError, TimedOut
from polytempo.server.layout import Spans, part, place_
from polytempo.server.message import Beat, Message, Outbox, Pull, Pulled, Push, Pushed, Reply, Stranger, View
from polytempo.server.requests import Requests
from polytempo.server.timing import Timing


class Refused(PolytempoError):
    """A shard would not have what this worker sent: not a number in it, a wrong shape, or a worker that has left."""


class Pending:
    """A push or pull under way. `value` is its answer once it is `done`."""

    def __init__(self, what: str, waits_for: set[int]) -> None:
        self.what, self.waits_for = what, waits_for
        self.value: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether every shard has answered."""
        return not self.waits_for

    def __str__(self) -> str:
        return f"{self.what} (shards {sorted(self.waits_for)} have not answered)"


class Client:
    """Worker `worker` in its life number `incarnation`, before the shards of `shards`, held by the nodes of `chains`.

    `versions[s]` is the version of shard s that the worker's parameters come from. Everything that is sent comes out of
    `outbox`; everything that arrives goes into `receive`.
    """

    def __init__(
        self,
        worker: int,
        incarnation: int,
        shards: Sequence[Spans],
        chains: Sequence[Sequence[int]],
        coordinator: int,
        timing: Timing | None = None,
        *,
        empty: Callable[[int, torch.dtype], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.worker, self.incarnation, self.coordinator = worker, incarnation, coordinator
        self.timing = timing or Timing()
        self.shards = tuple(shards)
        self.epoch = 0
        self.members: tuple[tuple[int, int], ...] = ()
        self.finished = False
        """Whether the run is over, as the coordinator says."""
        self.versions = [0] * len(shards)
        self.dropped = 0
        """How many pushes to single shards were not used."""
        numel = sum(span.numel for spans in shards for span in spans)
        self._empty = empty or (lambda count, kind: torch.empty(count, dtype=kind))
        self._pulled = self._empty(numel, dtype)
        self._asked = [Requests(worker, incarnation, chain[0], self.timing) for chain in chains]
        self._pending: dict[tuple[int, int], Pending] = {}
        self._tickets: list[int] = []
        self._samples = 0
        self._lrs: tuple[float, ...] = ()
        self._pushed_tickets: dict[Pending, tuple[int, ...]] = {}
        self._done: list[int] = []

    # ------------------------------------------------------------------ what the worker wants

    def begin(self, tickets: Sequence[int], lrs: Sequence[float], samples: int) -> None:
        """The next gradient is of these batches, to be used with these learning rates; the next push carries them."""
        self._tickets += tickets
        self._samples += samples
        self._lrs = tuple(lrs)

    def push(self, flat: Tensor, clock: int, samples: int = 0) -> Pending:
        """Begin a push; `flat` must stay unchanged until it is done. `samples` 0: those given to `begin`."""
        pending = Pending(f"push of step {clock}", set(range(len(self.shards))))
        tickets, count = tuple(self._tickets), samples or self._samples
        self._tickets, self._samples = [], 0
        for shard, spans in enumerate(self.shards):
            facts = (clock, self.versions[shard], count, self._lrs, tickets, part(flat, spans))
            self._add(shard, partial(_push, facts), pending)
        self._pushed_tickets[pending] = tickets
        return pending

    def pull(self, clock: int) -> Pending:
        """Begin a pull. Its value is this client's own flat vector: read it before the next pull begins."""
        pending = Pending(f"pull after step {clock}", set(range(len(self.shards))))
        for shard in range(len(self.shards)):
            self._add(shard, lambda worker, life, sequence: Pull(worker, life, sequence, clock, -1), pending)
        pending.value = self._pulled
        return pending

    def taken_done(self) -> tuple[int, ...]:
        """The tickets that every shard has acknowledged since the last call."""
        done, self._done = tuple(self._done), []
        return done

    @property
    def held(self) -> int:
        """How many tickets' gradients have not been pushed yet."""
        return len(self._tickets)

    @property
    def idle(self) -> bool:
        """Whether every request has been answered."""
        return not any(asked.unanswered for asked in self._asked)

    # ------------------------------------------------------------------ the machine

    def outbox(self, now_s: float) -> Outbox:
        """What is to be sent for the first time."""
        return [(asked.head, request) for asked in self._asked for request in asked.sendable(now_s)]

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take an answer or a view. Raises `Refused` where a shard has refused."""
        if isinstance(message, Reply):
            self._answer(message, now_s)
        elif isinstance(message, View):
            return self._see(message, now_s)
        return self.outbox(now_s)

    def tick(self, now_s: float) -> Outbox:
        """Send again what is late, and ask the coordinator whether the shards have moved. Raises `TimedOut`."""
        out: Outbox = []
        for shard, asked in enumerate(self._asked):
            if asked.waited_s(now_s) > self.timing.deadline_s:
                raise TimedOut(self.worker, None, f"request to shard {shard}", self.timing.deadline_s)
            out += [(asked.head, request) for request in asked.late(now_s)]
        if out:
            out.append((self.coordinator, Beat(self.worker, self.incarnation, self.epoch)))
        return out + self.outbox(now_s)

    def wait_s(self, now_s: float) -> float:
        """How long nothing is to be done unless something arrives."""
        return min(asked.wait_s(now_s) for asked in self._asked)

    def _add(self, shard: int, build: Callable[[int, int, int], Push | Pull], pending: Pending) -> None:
        request = self._asked[shard].add(build)
        self._pending[shard, request.sequence] = pending

    def _answer(self, reply: Reply, now_s: float) -> None:
        if not 0 <= reply.shard < len(self.shards) or reply.worker != self.worker:
            return
        pending = self._pending.get((reply.shard, reply.sequence))
        if isinstance(reply, Stranger):
            self._refused(reply, pending, now_s)
            return
        if pending is None or not self._asked[reply.shard].answered(reply, now_s):
            return
        del self._pending[reply.shard, reply.sequence]
        if isinstance(reply, Pulled):
            place_(self._pulled, self.shards[reply.shard], reply.values)
            self.versions[reply.shard] = reply.version
        if isinstance(reply, Pushed):
            self._learn(reply, pending)
        pending.waits_for.discard(reply.shard)
        if pending.done:
            self._done += self._pushed_tickets.pop(pending, ())

    def _refused(self, reply: Stranger, pending: Pending | None, now_s: float) -> None:
        """A head that was deposed and has not heard of it knows no new workers, so the first refusals are not believed."""
        waited_s = self._asked[reply.shard].waited_s(now_s)
        if pending is not None and reply.incarnation == self.incarnation and waited_s > self.timing.lost_s:
            raise Refused(f"worker {self.worker} is refused by shard {reply.shard}: {reply.reason}")

    def _learn(self, reply: Pushed, pending: Pending) -> None:
        if reply.verdict == "refused":
            raise Refused(f"shard {reply.shard} refused the {pending.what}: {reply.reason}")
        self.dropped += reply.verdict == "dropped"
        if reply.difference is not None:
            self.versions[reply.shard] = reply.version
            if pending.value is None:
                pending.value = torch.empty_like(self._pulled)
            place_(pending.value, self.shards[reply.shard], reply.difference)

    def _see(self, view: View, now_s: float) -> Outbox:
        out: Outbox = []
        if view.epoch >= self.epoch:
            self.members = view.members
            self.finished = self.finished or view.finished
        if view.epoch > self.epoch:
            self.epoch = view.epoch
            for asked, chain in zip(self._asked, view.chains, strict=True):
                if chain and chain[0] != asked.head:
                    out += [(chain[0], request) for request in asked.ask(chain[0], now_s)]
        return out + self.outbox(now_s)


def _push(
    facts: tuple[int, int, int, tuple[float, ...], tuple[int, ...], Tensor], worker: int, life: int, n: int
) -> Push:
    return Push(worker, life, n, *facts)
