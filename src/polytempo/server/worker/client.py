"""`Client`: a worker's side of the parameter server, without I/O.

push(flat) ─▶ one Push for each shard ─▶ … ─▶ every shard has answered: the push is done
pull()     ─▶ one Pull for each shard ─▶ … ─▶ the parts, copied together into one flat vector
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from polytempo.core.codec import Codec
from polytempo.core.errors import PolytempoError, TimedOut
from polytempo.server.encoding import Encoder, Opened
from polytempo.server.layout import Parameter, Spans, part, place_
from polytempo.server.message import Beat, Message, Outbox, Pull, Pulled, Push, Pushed, Reply, Rows, Stranger, View
from polytempo.server.pieces import split, without_tables
from polytempo.server.requests import Requests
from polytempo.server.timing import Timing
from polytempo.server.worker.lent_gradients import LentGradients
from polytempo.server.worker.touched_rows import TableRows, TouchedRows


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
    `outbox`; everything that arrives goes into `receive`. `parameters` are needed where some of them are tables: these
    are no part of the flat vectors, but travel by touched rows, in by `accrue` and out by `pulled_rows`. `outgoing`
    lends what is pushed from memory that the shards read in place. `codec` encodes it instead, and the shards encode
    by `pull_codec` what is pulled: both as in `Service`, and both need `parameters`.

    What the codec holds back is this life's: whoever comes back with the next incarnation owes nothing.
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
        outgoing: LentGradients | None = None,
        dtype: torch.dtype = torch.float32,
        parameters: Sequence[Parameter] = (),
        codec: Codec | None = None,
        pull_codec: Codec | None = None,
    ) -> None:
        self.worker, self.incarnation, self.coordinator = worker, incarnation, coordinator
        self.timing = timing or Timing()
        found = [split(parameters, spans) for spans in shards]
        self.shards = tuple(each.dense for each in found)
        """Of each shard the ranges of the flat vector, in which there are no tables."""
        pieces = [each.pieces for each in found]
        self._touched = TouchedRows(pieces) if any(pieces) else None
        self.epoch = 0
        self.members: tuple[tuple[int, int], ...] = ()
        self.finished = False
        """Whether the run is over, as the coordinator says."""
        self.versions = [0] * len(shards)
        self.dropped = 0
        """How many pushes to single shards were not used."""
        numel = sum(span.numel for spans in self.shards for span in spans)
        self._no_rows: Sequence[tuple[Rows, ...]] = ((),) * len(shards)
        self._outgoing = outgoing
        self._empty = empty or (lambda count, kind: torch.empty(count, dtype=kind))
        self._pulled = self._empty(numel, dtype)
        dense = without_tables(parameters)
        self._encoder = None if codec is None else Encoder(codec, dense, self.shards, dtype, worker, incarnation)
        self._opened = None if pull_codec is None else Opened(pull_codec, dense, self.shards, dtype)
        heads = [chain[0] if chain else coordinator for chain in chains]  # one without a copy is gone, and never asked
        self._asked = [Requests(worker, incarnation, head, self.timing) for head in heads]
        self.layout = 0
        """The layout (`View.layout`) that `shards` is of."""
        self.running: Callable[[], Tensor | None] = lambda: None
        """The running statistics of the worker's norms as they are now, float64: what travels with a push."""
        self._pulled_running: Tensor | None = None
        self._live: Sequence[int] = range(len(shards))
        """The shards that hold something."""
        self._coming: View | None = None
        """A view of another layout, taken over as soon as nothing is under way."""
        self._pending: dict[tuple[int, int], Pending] = {}
        self._tickets: list[int] = []
        self._batches: list[int] = []
        self._samples = 0
        self._lrs: list[tuple[float, ...]] = [()]
        """Of each of the gradients that the next push is of, or of those of the last push, if there is none."""
        self._pushed_batches: dict[Pending, tuple[int, ...]] = {}
        self._done: list[int] = []

    # ------------------------------------------------------------------ what the worker wants

    def begin(
        self, tickets: Sequence[int], lrs: Sequence[float], samples: int, *, done: Sequence[int] | None = None
    ) -> None:
        """The next gradient is of these batches, to be used with these learning rates; the next push carries them.

        A push of several gradients carries their sum and the mean of their rates: under a schedule that changes within
        it each counts alike, and all together count what they should.

        `done`: the batches that are done with it, where `tickets` are numbers of slices and not of batches.
        """
        if not self._tickets:
            self._lrs = []
        self._lrs.append(tuple(lrs))
        self._tickets += tickets
        self._batches += tickets if done is None else done
        self._samples += samples

    def accrue(self, gradient: TableRows) -> None:
        """Some rows of a table's gradient, ascending, each once: the next push carries the sum of all such."""
        if self._touched is None:
            raise ValueError(f"there are no tables, so nobody would get the rows of table {gradient.table}")
        self._touched.accrue(gradient)

    def pulled_rows(self) -> list[TableRows]:
        """The rows of tables that pulls have brought since the last call, oldest first."""
        return [] if self._touched is None else self._touched.taken()

    def pulled_running(self) -> Tensor | None:
        """The running statistics that the last pull has brought, if there was one since the last call."""
        running, self._pulled_running = self._pulled_running, None
        return running

    def push(self, flat: Tensor, clock: int, samples: int = 0) -> Pending:
        """Begin a push; `flat` must stay unchanged until it is done. `samples` 0: those given to `begin`.

        Raises NotFinite where there is a codec and `flat` has NaN or an infinity: no shard would see it any more.
        """
        pending = Pending(f"push of step {clock}", set(self._live))
        messages = None if self._encoder is None else self._encoder.encode(flat)
        if self._outgoing is not None and messages is None:
            flat = self._outgoing.lend(flat, pending)
        tickets, count = tuple(self._tickets), samples or self._samples
        batches, lrs, running = tuple(self._batches), _mean(self._lrs), self.running()
        self._lrs = [lrs]
        self._tickets, self._batches, self._samples = [], [], 0
        rows = self._no_rows
        if self._touched is not None:
            rows, flat = self._touched.take(), flat.to(self._pulled.dtype)  # which an empty vector may lack
        for shard in self._live:
            mine = part(flat, self.shards[shard]) if messages is None else messages[shard]
            facts = (clock, self.versions[shard], count, lrs, tickets, mine, rows[shard], running)
            self._add(shard, partial(_push, facts), pending)
        self._pushed_batches[pending] = batches
        return pending

    def pull(self, clock: int) -> Pending:
        """Begin a pull. Its value is this client's own flat vector: read it before the next pull begins."""
        pending = Pending(f"pull after step {clock}", set(self._live))
        for shard in self._live:
            basis = -1 if self._touched is None else self._touched.bases[shard]
            self._add(shard, partial(_pull, clock, basis), pending)
        pending.value = self._pulled
        return pending

    def taken_done(self) -> tuple[int, ...]:
        """The batches whose gradients every shard has acknowledged since the last call."""
        done, self._done = tuple(self._done), []
        return done

    @property
    def held(self) -> int:
        """How many tickets' gradients have not been pushed yet."""
        return len(self._tickets)

    def flops(self, *, pushes: bool) -> float:
        """What a push, or else a pull, costs this worker in operations: what its codec asks for."""
        coded = self._encoder if pushes else self._opened
        return 0.0 if coded is None else coded.flops

    def owed(self) -> Tensor | None:
        """What the codec holds back of each element, flat; None without a codec."""
        return None if self._encoder is None else self._encoder.owed()

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
        out = self._see(message, now_s) if isinstance(message, View) else []
        if self._coming is not None and self.idle:
            self._reshape(self._coming)
        return out + self.outbox(now_s)

    def tick(self, now_s: float, *, all_read: bool = True) -> Outbox:
        """Send again what is late, and ask the coordinator whether the shards have moved. Raises `TimedOut`.

        Not where mail lies unread (`all_read`): the worker may have computed for hours since the answer came.
        """
        out: Outbox = []
        for shard, asked in enumerate(self._asked):
            if all_read and asked.waited_s(now_s) > self.timing.deadline_s:
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
            if self._opened is None:
                place_(self._pulled, self.shards[reply.shard], reply.values)
            else:
                self._opened.place_(self._pulled, reply.shard, reply.values)
            if self._touched is not None:
                self._touched.arrive(reply.shard, reply.version, reply.rows)
            self.versions[reply.shard] = reply.version
            if reply.shard == self._live[0]:  # every shard has them
                self._pulled_running = reply.running
        if isinstance(reply, Pushed):
            self._learn(reply, pending)
        pending.waits_for.discard(reply.shard)
        if pending.done:
            self._done += self._pushed_batches.pop(pending, ())
            if self._outgoing is not None:
                self._outgoing.take_back(pending)

    def _refused(self, reply: Stranger, pending: Pending | None, now_s: float) -> None:
        """A head that was deposed and has not heard of it knows no new workers: the first refusals are not believed."""
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
                pending.value = torch.zeros_like(self._pulled)  # shards that had it already answer no difference
            place_(pending.value, self.shards[reply.shard], reply.difference)

    def _see(self, view: View, now_s: float) -> Outbox:
        out: Outbox = []
        if view.epoch >= self.epoch:
            self.members = view.members
            self.finished = self.finished or view.finished
        if view.epoch > self.epoch:
            self.epoch = view.epoch
            if view.layout > self.layout:
                self._coming = view
            for asked, chain in zip(self._asked, view.chains, strict=False):  # one that is only coming is not asked yet
                if chain and chain[0] != asked.head:
                    out += [(chain[0], request) for request in asked.ask(chain[0], now_s)]
        return out

    def _reshape(self, view: View) -> None:
        """Shards have come or gone: pull before you push. Nobody has anything under way then, but it may seem so to
        one that was taken for lost; it goes on when all is answered, or ends."""
        self._coming = None
        self.layout, self.shards = view.layout, view.spans
        self._live = [shard for shard, spans in enumerate(view.spans) if spans]
        for coded in (self._encoder, self._opened):
            if coded is not None:
                coded.move(view.spans)
        for chain in view.chains[len(self._asked) : len(view.spans)]:
            head = chain[0] if chain else self.coordinator  # it has come and gone, and is never asked
            self._asked.append(Requests(self.worker, self.incarnation, head, self.timing))
            self.versions.append(0)
        self._no_rows = ((),) * len(view.spans)


def _mean(several: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Of each column; to the bit where all rows are alike."""
    first = several[0]
    if all(one == first for one in several):
        return first
    return tuple(math.fsum(column) / len(several) for column in zip(*several, strict=True))


_PushFacts = tuple[int, int, int, tuple[float, ...], tuple[int, ...], Tensor, tuple[Rows, ...], Tensor | None]


def _push(facts: _PushFacts, worker: int, life: int, sequence: int) -> Push:
    return Push(worker, life, sequence, *facts)


def _pull(clock: int, basis: int, worker: int, life: int, sequence: int) -> Pull:
    return Pull(worker, life, sequence, clock, basis)
