"""`Client`: a worker's side of the parameter server, without I/O.

push(flat) ─▶ one Push for each shard ─▶ … ─▶ every shard has answered: the push is done
pull()     ─▶ one Pull for each shard ─▶ … ─▶ the parts, copied together into one flat vector
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from polytempo.core.codec import Codec, PullCodec
from polytempo.core.errors import PolytempoError, TimedOut
from polytempo.server.encoding import Decoder, Encoder
from polytempo.server.layout import Parameter, Spans, part, place_, plain_empty
from polytempo.server.message import (
    Beat,
    Message,
    Outbox,
    Pull,
    Pulled,
    Push,
    PushAlone,
    Pushed,
    Reply,
    Rows,
    Stranger,
    View,
)
from polytempo.server.pieces import split, without_tables
from polytempo.server.requests import Requests
from polytempo.server.timing import Timing
from polytempo.server.worker.host.host_exchange import HostExchange, OwnPush
from polytempo.server.worker.host.host_peers import HostPeers, Offer, Presence
from polytempo.server.worker.host.lent_gradients import LentGradients
from polytempo.server.worker.next_push import NextPush, PendingExchange
from polytempo.server.worker.touched_rows import TableRows, TouchedRows


class VectorFormat(NamedTuple):
    """`parameters` are needed where some of them are tables, and for codecs. The codecs are the codecs of `Service`."""

    dtype: torch.dtype = torch.float32
    parameters: Sequence[Parameter] = ()
    codec: Codec | None = None
    """Encodes pushed gradients; None: vectors travel as they are."""
    pull_codec: PullCodec | None = None
    """Encodes the shards' answers to pulls."""


R = TypeVar("R", Push, Pull)

_MOST_STALENESS = 1000


class Refused(PolytempoError):
    """A shard refused a request of this worker: a NaN, a wrong shape, or a worker that is not a member."""


class Client:
    """Worker `worker` in its life `incarnation`. Shard s holds the ranges `shards[s]`, on the nodes `chains[s]`.

    `versions[s]` is the version of shard s that the worker's parameters come from. Every message to send comes out of
    `outbox`; every message that arrives goes into `receive`. Tables are not in the flat vectors: they travel by touched
    rows, in by `accrue` and out by `pulled_rows`. `memory` lends pushed vectors and holds pulled ones where the shards
    read it in place; None: memory of this process. `peers`: the workers of this one's host, where their gradients are
    summed before they are pushed; a push while `alone` is set is left out of that.

    The residual of a codec belongs to one life: a worker that comes back begins without one.
    """

    def __init__(
        self,
        worker: int,
        incarnation: int,
        shards: Sequence[Spans],
        chains: Sequence[Sequence[int]],
        coordinator: int,
        timing: Timing | None = None,
        form: VectorFormat | None = None,
        *,
        memory: LentGradients | None = None,
        peers: Sequence[int] = (),
    ) -> None:
        self.worker, self.incarnation, self.coordinator = worker, incarnation, coordinator
        self.timing = timing or Timing()
        form = form or VectorFormat()
        self.epoch = 0
        self.members: tuple[tuple[int, int], ...] = ()
        self.finished = False
        """True once the coordinator has ended the run."""
        self.versions = [0] * len(shards)
        self.dropped = 0
        """The number of pushes to single shards that were not used."""
        self.staleness: deque[int] = deque(maxlen=_MOST_STALENESS)
        """τ of the latest pushes, of each shard, since the caller cleared it."""
        self._memory = memory
        self._begin_exchange(form, shards)
        heads = [chain[0] if chain else coordinator for chain in chains]  # a drained shard is never asked
        self.asked = [Requests(worker, incarnation, head, self.timing) for head in heads]
        """The requests to each shard."""
        self.layout = 0
        """The layout (`View.layout`) that `shards` is of."""
        self.running: Callable[[], Tensor | None] = lambda: None
        """The present running statistics of the worker's norm layers, float64: they travel with a push."""
        self._pulled_running: Tensor | None = None
        self._live: Sequence[int] = [number for number, spans in enumerate(shards) if spans]
        """The shards that hold something of this worker's parameters."""
        self._coming: View | None = None
        """A view of another layout, which takes effect as soon as no request is under way."""
        self._pending: dict[tuple[int, int], PendingExchange] = {}
        self.resulting = False
        """The next pull is of the resulting weights, which are not its region's where the rule has regions."""
        self.last = False
        """The next pull says that the worker has no more work."""
        self._next_push = NextPush()
        self._pushed_batches: dict[PendingExchange, tuple[int, ...]] = {}
        self._done: list[int] = []
        self.alone = False
        self._host: HostExchange | None = None
        if set(peers) - {worker}:
            self._host = HostExchange(self, HostPeers(worker, peers), self.timing, memory)

    def _begin_exchange(self, form: VectorFormat, shards: Sequence[Spans]) -> None:
        """Make the memory, tables and codecs of pushes and pulls."""
        found = [split(form.parameters, spans) for spans in shards]
        self.shards = tuple(each.dense for each in found)
        """Each shard's ranges of the flat vector, without tables."""
        pieces = [each.pieces for each in found]
        self._touched = TouchedRows(pieces) if any(pieces) else None
        self._no_rows: Sequence[tuple[Rows, ...]] = ((),) * len(shards)
        numel = sum(span.numel for spans in self.shards for span in spans)
        self._pulled = (plain_empty if self._memory is None else self._memory.empty)(numel, form.dtype)
        dense, ranges = without_tables(form.parameters), self.shards
        self._encoder = self._decoder = None
        if form.codec is not None:
            self._encoder = Encoder(form.codec, dense, ranges, form.dtype, self.worker, self.incarnation)
        if form.pull_codec is not None:
            self._decoder = Decoder(form.pull_codec, dense, ranges, form.dtype)

    # ------------------------------------------------------------------ the worker's calls

    def begin(
        self,
        tickets: Sequence[int],
        lrs: Sequence[float],
        samples: int,
        *,
        done: Sequence[int] | None = None,
        versions: tuple[int, ...] | None = None,
    ) -> None:
        """The next gradient is of these batches and used with these learning rates; the next push carries them.

        A push of several gradients carries their sum and the mean of their rates: under a schedule that changes within
        it each counts alike.

        `done`: the batches that are done with it, where `tickets` are numbers of slices and not of batches. `versions`:
        as `versions` was when the gradient's parameters came, where the worker has had newer ones since.
        """
        self._next_push.add(tickets, lrs, samples, tickets if done is None else done, versions)

    def note_unused(self, names: Collection[str]) -> None:
        """The next gradient has nothing for the parameters `names`: shards leave these alone."""
        self._next_push.note_unused(names)

    def accrue(self, gradient: TableRows) -> None:
        """Some rows of a table's gradient, ascending, each once: the next push carries the sum of all such."""
        if self._touched is None:
            raise ValueError(f"there are no tables, so no shard takes the rows of table {gradient.table}")
        self._touched.accrue(gradient)

    def pulled_rows(self) -> list[TableRows]:
        """The rows of tables that pulls have brought since the last call, oldest first."""
        return [] if self._touched is None else self._touched.taken()

    def pulled_running(self) -> Tensor | None:
        """The running statistics that the last pull has brought, if there was one since the last call."""
        running, self._pulled_running = self._pulled_running, None
        return running

    def push(self, flat: Tensor, clock: int, samples: int = 0) -> PendingExchange:
        """Begin a push; `flat` must stay unchanged until it is done. `samples` 0: those given to `begin`.

        Raises NotFinite where there is a codec and `flat` has NaN or an infinity: no shard would see it any more.
        """
        pending = PendingExchange(f"push of step {clock}", set(self._live))
        messages = None if self._encoder is None else self._encoder.encode(flat)
        if self._memory is not None and messages is None:
            flat = self._memory.lend(flat, pending)
        facts, running, rows = self._next_push.take(samples), self.running(), self._no_rows
        bases = facts.versions or self.versions
        if self._touched is not None:
            rows, flat = self._touched.take(), flat.to(self._pulled.dtype)  # which an empty vector may lack
        builds = {
            shard: partial(
                Push,
                clock=clock,
                basis=bases[shard],
                samples=facts.samples,
                lrs=facts.lrs,
                tickets=facts.tickets,
                gradient=part(flat, self.shards[shard]) if messages is None else messages[shard],
                rows=rows[shard],
                running=running,
                unused=facts.unused,
            )
            for shard in self._live
        }
        self._pushed_batches[pending] = facts.batches
        if self._host is not None and not self.alone:
            self._host.begin(OwnPush(pending, clock, flat, facts, running, builds))
        else:
            for shard, build in builds.items():
                self.add(shard, build, pending)
        return pending

    def pull(self, clock: int) -> PendingExchange:
        """Begin a pull. Its value is this client's own flat vector: read it before the next pull begins."""
        pending = PendingExchange(f"pull after step {clock}", set(self._live))
        for shard in self._live:
            basis = -1 if self._decoder is None else self._decoder.held(shard)
            basis = basis if self._touched is None else self._touched.bases[shard]
            build = partial(Pull, clock=clock, basis=basis, resulting=self.resulting, last=self.last)
            self.add(shard, build, pending)
        self.resulting = self.last = False
        pending.value = self._pulled
        return pending

    def taken_done(self) -> tuple[int, ...]:
        """The batches with gradients that every shard has acknowledged since the last call."""
        done, self._done = tuple(self._done), []
        return done

    @property
    def held(self) -> int:
        """The number of tickets with gradients that have not been pushed yet."""
        return len(self._next_push.tickets)

    @property
    def gathers(self) -> bool:
        """True if a push waits, for other workers of the host or for an answer, before it leaves."""
        return self._host is not None and self._host.gathers

    def rest(self) -> None:
        """There is nothing to push for now: other workers of the host need not wait for this one."""
        if self._host is not None:
            self._host.rest()

    @property
    def meets(self) -> bool:
        """True if pushes are summed with other workers' pushes on the host."""
        return self._host is not None

    def flops(self, *, pushes: bool) -> float:
        """The cost of a push, or else of a pull, for this worker: the operations of its codec."""
        coded = self._encoder if pushes else self._decoder
        return 0.0 if coded is None else coded.flops

    def residual(self) -> Tensor | None:
        """The codec's residual of each element, flat; None without a codec."""
        return None if self._encoder is None else self._encoder.residual()

    @property
    def idle(self) -> bool:
        """True if every request has been answered, and none waits for other workers of the host."""
        return self.all_answered and not self.gathers

    @property
    def all_answered(self) -> bool:
        """True if no request is under way."""
        return not any(asked.unanswered for asked in self.asked)

    # ------------------------------------------------------------------ the machine

    def outbox(self, now_s: float) -> Outbox:
        """The messages that are sent for the first time now."""
        out = [] if self._host is None else self._host.go_on(now_s)
        return out + [(asked.head, one) for asked in self.asked if asked.queues for one in asked.sendable(now_s)]

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take an answer or a view. Raises `Incompatible` where a shard has refused."""
        out: Outbox = []
        match message:
            case PushAlone():
                out = self._split(message, now_s)
            case Reply():
                self._answer(message, now_s)
            case View():
                out = self._see(message, now_s)
            case Offer() if self._host is not None:
                self._host.peers.take(message)
            case Presence() if self._host is not None:
                self._host.peers.attend(message)
        if self._host is not None:
            out += self._host.look(now_s)
        if self._coming is not None and self.idle:
            self._reshape(self._coming)
        return out + self.outbox(now_s)

    def tick(self, now_s: float, *, all_read: bool = True) -> Outbox:
        """Send late requests again, and ask the coordinator whether the shards have moved. Raises `TimedOut`.

        It does not raise while mail is unread (`all_read`): the worker may have computed for hours since it came.
        """
        out: Outbox = []
        for shard, asked in enumerate(self.asked):
            if all_read and asked.waited_s(now_s) > self.timing.deadline_s:
                raise TimedOut(self.worker, None, f"request to shard {shard}", self.timing.deadline_s)
            out += [(asked.head, request) for request in asked.late(now_s)]
        if out:
            out.append((self.coordinator, Beat(self.worker, self.incarnation, self.epoch)))
            out += [] if self._host is None else self._host.late()
        return out + self.outbox(now_s)

    def is_due(self, now_s: float) -> bool:
        """True if `tick` may have something to send."""
        return self._host is not None or any(asked.is_due(now_s) for asked in self.asked)

    def wait_s(self, now_s: float) -> float:
        """The time until the next `tick`, unless a message arrives."""
        host_s = [] if self._host is None else [self._host.wait_s(now_s)]
        return min([asked.wait_s(now_s) for asked in self.asked] + host_s)

    def add(self, shard: int, build: Callable[[int, int, int], R], pending: PendingExchange) -> R:
        """Queue a request; its answer belongs to `pending`."""
        request = self.asked[shard].add(build)
        self._pending[shard, request.sequence] = pending
        return request

    def _split(self, reply: PushAlone, now_s: float) -> Outbox:
        """Send this worker's own push: the host's push has not brought it."""
        if (reply.worker, reply.incarnation) != (self.worker, self.incarnation):
            return []
        asked = self.asked[reply.shard]
        return [(asked.head, request) for request in asked.alone(now_s, reply.sequence)]

    def _answer(self, reply: Reply, now_s: float) -> None:
        if not 0 <= reply.shard < len(self.shards) or reply.worker != self.worker:
            return
        pending = self._pending.get((reply.shard, reply.sequence))
        if isinstance(reply, Stranger):
            return self._refused(reply, pending, now_s)
        if pending is None or not self.asked[reply.shard].answered(reply, now_s):
            return
        del self._pending[reply.shard, reply.sequence]
        if isinstance(reply, Pulled):
            if self._decoder is None:
                place_(self._pulled, self.shards[reply.shard], reply.values)
            else:
                self._decoder.place_(self._pulled, reply.shard, reply.values, reply.version)
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
            if self._memory is not None:
                self._memory.take_back(pending)
            if self._host is not None and self.all_answered:
                self._host.answered(now_s)

    def _refused(self, reply: Stranger, pending: PendingExchange | None, now_s: float) -> None:
        """Ignore refusals at first: a head that was deposed and does not know it yet knows no new workers."""
        waited_s = self.asked[reply.shard].waited_s(now_s)
        if pending is not None and reply.incarnation == self.incarnation and waited_s > self.timing.lost_s:
            raise Refused(f"worker {self.worker} is refused by shard {reply.shard}: {reply.reason}")

    def _learn(self, reply: Pushed, pending: PendingExchange) -> None:
        if reply.verdict == "refused":
            raise Refused(f"shard {reply.shard} refused the {pending.what}: {reply.reason}")
        self.dropped += reply.verdict == "dropped"
        self.staleness.append(reply.staleness)
        if reply.difference is not None:
            self.versions[reply.shard] = reply.version
            if pending.value is None:
                # shards that had it already answer no difference
                pending.value = self._pulled if self._pulled.is_meta else torch.zeros_like(self._pulled)
            place_(pending.value, self.shards[reply.shard], reply.difference)

    def _see(self, view: View, now_s: float) -> Outbox:
        out: Outbox = []
        if view.epoch >= self.epoch:
            self.members = view.members
            if self._host is not None:
                self._host.peers.see(view.members)
            self.finished = self.finished or view.finished
        if view.epoch > self.epoch:
            self.epoch = view.epoch
            if view.layout > self.layout:
                self._coming = view
            # a new shard is not asked before its layout takes effect
            for asked, chain in zip(self.asked, view.chains, strict=False):
                if chain and chain[0] != asked.head:
                    out += [(chain[0], request) for request in asked.ask(chain[0], now_s)]
        return out

    def _reshape(self, view: View) -> None:
        """Shards were added or drained: the next request must be a pull. No request is under way.

        A worker that was given up by mistake may still have some: it goes on when all are answered, or ends.
        """
        self._coming = None
        self.layout, self.shards = view.layout, view.spans
        self._live = [shard for shard, spans in enumerate(view.spans) if spans]
        for coded in (self._encoder, self._decoder):
            if coded is not None:
                coded.move(view.spans)
        for chain in view.chains[len(self.asked) : len(view.spans)]:
            head = chain[0] if chain else self.coordinator  # a shard that was drained is never asked
            self.asked.append(Requests(self.worker, self.incarnation, head, self.timing))
            self.versions.append(0)
        self._no_rows = ((),) * len(view.spans)
