"""`HostExchange`: a worker's pushes on a host that sums its workers' gradients first. It leads its host, or offers to
the leader.

    begin ──▶ leads? ── yes ─▶ waits for offers ──▶ Push of the sum to every shard ──▶ each worker gets its own answer
                 └──── no ──▶ Offer to the leader ──────────────────────────────────▶     │
                                    └─ PushAlone, no answer in time, the leader is gone ─▶ Push alone, same number

An offer may be lost without harm. The requests of all workers are numbered and awaited as always; the leader's message
only brings them to the shards, first and once. Each worker sends its repeated pushes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from polytempo.server.layout import Spans, part
from polytempo.server.message import Outbox, Push, PushPart
from polytempo.server.requests import Requests
from polytempo.server.step_rates import common
from polytempo.server.timing import Timing
from polytempo.server.worker.host.host_peers import HostPeers, Offer, Presence
from polytempo.server.worker.host.lent_gradients import LentGradients, add_all_
from polytempo.server.worker.next_push import PendingExchange, PushFacts, mean_rates

_STEPS = 2.0
"""A worker waits for the others as long as this many of its own steps."""
_ANSWERS = 3.0
"""And for the answer as long as this many of the slowest answers of late."""
_RECENT = 8


class OwnPush(NamedTuple):
    """A push that has begun: `builds` makes each shard's request."""

    pending: PendingExchange
    clock: int
    flat: Tensor
    facts: PushFacts
    running: Tensor | None
    builds: Mapping[int, Callable[[int, int, int], Push]]


class ShardLines(Protocol):
    """The methods that it needs of a worker's client."""

    worker: int
    incarnation: int
    layout: int
    versions: list[int]
    asked: list[Requests]

    def add(self, shard: int, build: Callable[[int, int, int], Push], pending: PendingExchange) -> Push:
        """Queue a request; its answer belongs to `pending`."""

    @property
    def shards(self) -> Sequence[Spans]:
        """Each shard's ranges of the flat vector."""

    @property
    def all_answered(self) -> bool:
        """True if no request is under way."""


class HostExchange:
    """The pushes of the worker with the client `lines`, on a host with the other workers `peers`.

    It has one push under way at a time. Cost within the host: each gradient is read once by the leader.
    """

    def __init__(self, lines: ShardLines, peers: HostPeers, timing: Timing, memory: LentGradients | None) -> None:
        self.peers = peers
        self._lines, self._timing, self._memory = lines, timing, memory
        self._own: OwnPush | None = None
        self._until_s: float | None = None
        self._offered_to: int | None = None
        self._attends = False
        self._unsaid: Outbox = []
        self._begun_s = self._free_s = 0.0
        self._answers_s: deque[float] = deque(maxlen=_RECENT)

    @property
    def gathers(self) -> bool:
        """True if a push has begun that has not left."""
        return self._own is not None

    def begin(self, own: OwnPush) -> None:
        """The next push. It leaves by `go_on`."""
        assert self._own is None
        self._own, self._until_s = own, None

    def rest(self) -> None:
        """This worker has nothing to push for now: the others of the host are not to wait for it."""
        if self._attends:
            self._attend(present=False)

    def go_on(self, now_s: float) -> Outbox:
        """Offer, or lead, as soon as that can be."""
        if self._own is not None and self._lines.all_answered and self._until_s is None:
            self._gather(now_s)
        out, self._unsaid = self._unsaid, []
        if self._own is None or self._until_s is None:
            return out
        leader = self.peers.leader
        if leader != self.peers.worker and not self.peers.has_offers:
            return out + self._offer(now_s, leader, self._own)
        if self.peers.awaited and now_s < self._until_s:
            return out
        for late in self.peers.awaited:
            self.peers.give_up(late)
        return out + self._lead(now_s, self._own)

    def wait_s(self, now_s: float) -> float:
        """The time until the next `look`, unless a message arrives."""
        return float("inf") if self._own is None or self._until_s is None else max(0.0, self._until_s - now_s)

    def answered(self, now_s: float) -> None:
        """Every shard has answered the requests under way."""
        if self._begun_s > self._free_s:
            self._answers_s.append(now_s - self._begun_s)
        self._free_s, self._offered_to = now_s, None

    def look(self, now_s: float) -> Outbox:
        """The messages to send because the offer's leader is gone."""
        if self._offered_to is None or not self.peers.is_gone(self._offered_to):
            return []
        self._offered_to = None
        return [(asked.head, request) for asked in self._lines.asked for request in asked.alone(now_s)]

    def late(self) -> Outbox:
        """The push is sent alone, since no answer came in time: the leader must not send it any more."""
        if self._offered_to is None:
            return []
        leader, self._offered_to = self._offered_to, None
        self.peers.give_up(leader)
        return [(leader, Presence(self._lines.worker, self._lines.incarnation, True))]

    def _gather(self, now_s: float) -> None:
        """Begin to wait for the others."""
        patience_s = max(self._timing.retry_s, _STEPS * (now_s - self._free_s) if self._free_s else 0.0)
        self._begun_s, self._until_s = now_s, now_s + patience_s
        if not self._attends:
            self._attend(present=True)
        elif self.peers.leader == self.peers.worker:  # some may not have heard that it takes part
            self._say(self.peers.members)
        if self.peers.leader != self.peers.worker:  # another one leads, but some have offered to this one
            self._until_s = now_s

    def _attend(self, *, present: bool) -> None:
        self._attends = present
        self._say(self.peers.peers)

    def _say(self, to: Sequence[int]) -> None:
        said = Presence(self._lines.worker, self._lines.incarnation, self._attends)
        self._unsaid += [(peer, said) for peer in to]

    def _patience_s(self, least_s: float) -> float:
        """The longest time for an answer that comes by another worker's message."""
        assert self._until_s is not None
        return max(least_s, self._until_s - self._begun_s, _ANSWERS * max(self._answers_s, default=0.0))

    def _offer(self, now_s: float, leader: int, own: OwnPush) -> Outbox:
        lines, patience_s = self._lines, self._patience_s(self._timing.longest_retry_s)
        self._own = None
        for shard, build in own.builds.items():
            lines.add(shard, build, own.pending)
            lines.asked[shard].hand_over(now_s, patience_s, closes=True)
        self._offered_to = leader
        offer = Offer(
            worker=lines.worker,
            incarnation=lines.incarnation,
            layout=lines.layout,
            sequences=tuple(asked.last for asked in lines.asked),
            clock=own.clock,
            bases=tuple(lines.versions),
            samples=own.facts.samples,
            lrs=own.facts.lrs,
            tickets=own.facts.tickets,
            gradient=own.flat,
            running=own.running,
            unused=own.facts.unused,
        )
        return [(leader, offer)]

    def _lead(self, now_s: float, own: OwnPush) -> Outbox:
        """Push this worker's gradient and the offered ones; alone by its own queue, where there are none."""
        lines, patience_s = self._lines, self._patience_s(self._timing.retry_s)
        self._own = None
        requests = {shard: lines.add(shard, build, own.pending) for shard, build in own.builds.items()}
        offers = [offer for offer in self.peers.taken_offers() if self._fits(offer, own.flat)]
        if not offers:
            return []
        total = self._sum([own.flat, *(offer.gradient for offer in offers)], own.pending)
        lrs = mean_rates([own.facts.lrs, *(offer.lrs for offer in offers)])
        unused = reduce(common, (offer.unused for offer in offers), own.facts.unused)
        out: Outbox = []
        for shard, request in requests.items():
            asked = lines.asked[shard]
            asked.hand_over(now_s, patience_s, closes=False)
            parts = tuple(_part_of(offer, shard) for offer in offers)
            gradient = part(total, lines.shards[shard])
            out.append((asked.head, replace(request, gradient=gradient, lrs=lrs, parts=parts, unused=unused)))
        return out

    def _fits(self, offer: Offer, own: Tensor) -> bool:
        """True if `offer` can be summed with `own`; otherwise its worker pushes it."""
        alike = offer.gradient.shape == own.shape and offer.gradient.dtype == own.dtype
        num_shards = len(self._lines.asked)
        return alike and offer.layout == self._lines.layout and len(offer.sequences) == len(offer.bases) == num_shards

    def _sum(self, several: Sequence[Tensor], pending: object) -> Tensor:
        if self._memory is not None:
            return self._memory.sum_of(several, pending)
        return add_all_(torch.empty_like(several[0]), several[0], several[1:])


def _part_of(offer: Offer, shard: int) -> PushPart:
    return PushPart(
        offer.worker,
        offer.incarnation,
        offer.sequences[shard],
        offer.clock,
        offer.bases[shard],
        offer.samples,
        offer.tickets,
        offer.running,
    )
