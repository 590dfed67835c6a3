"""`Reshaper`: adds and drains shards while a run goes on. The coordinator's part of it, without I/O.

    pause      no new tickets; workers push their gradients, and wait      (`BatchScheduler.pause`; `quiet` ends it)
    lend       givers show the elements that takers take over              Lend ──▶ Lent
    take       takers hold them, in every copy                             Reshape ──▶ Noted
    release    givers hold them no more                                    Reshape ──▶ Noted
    resume     a new view: layout, ranges, chains; a worker that gets a ticket must know it, and pulls the weights

While elements move, the shards get no other request: no worker has one under way, and the coordinator keeps changes of
members, snapshots and deals back. So takers take exactly the elements that givers lend. At any moment at least one
shard holds each element, and workers push it to at most one. Every step is a request to a shard's log, so it is
repeated until it is answered, applied once, and in every copy before it is answered: a copy may die at any moment. One
change at a time: a shard gives or takes, never both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from sys import maxsize
from typing import NamedTuple

from polytempo.server.layout import Parameter, Spans, with_shard_added, with_shard_drained
from polytempo.server.message import Inquire, Lend, Lent, Outbox, Request, Reshape
from polytempo.server.requests import Requests
from polytempo.server.snapshots.transfer import common, covers

Build = Callable[[int, int, int], Request]
"""(worker, incarnation, sequence) -> a request with these."""
Orders = list[tuple[int, Build]]
"""(shard, the request that it gets)."""


class Change(NamedTuple):
    """A new shard on `nodes`, or the end of shard `drained`. `target`: the ranges of each shard afterwards."""

    target: tuple[Spans, ...]
    nodes: tuple[int, ...] = ()
    drained: int = -1


class Shards(NamedTuple):
    """The coordinator's own lists about shards, by number. They change as shards are added and drained."""

    chains: list[tuple[int, ...]]
    """() for a drained shard."""
    asked: list[Requests]
    known: list[int]
    """The number of membership changes that each shard has noted."""

    @property
    def busy(self) -> bool:
        """True if a shard has not answered yet."""
        return any(asked.unanswered for asked in self.asked)

    @property
    def live(self) -> list[tuple[int, Requests]]:
        """The requests to shards that are not drained, by number."""
        return [(shard, self.asked[shard]) for shard, chain in enumerate(self.chains) if chain]

    def ask(self, build: Callable[[int, int, int], Request]) -> set[tuple[int, int]]:
        """Put `build(worker, incarnation, sequence)` in every live shard's line; the (shard, sequence) of each."""
        return {(shard, asked.add(build).sequence) for shard, asked in self.live}

    def sendable(self, now_s: float) -> Outbox:
        """The requests to send for the first time now."""
        return [(asked.head, request) for asked in self.asked for request in asked.sendable(now_s)]

    def headed_by(self, node: int) -> int | None:
        """The shard with its first copy on `node`; None if there is none."""
        return next((shard for shard, chain in enumerate(self.chains) if chain[:1] == (node,)), None)

    def late(self, now_s: float) -> Outbox:
        """The requests to send again."""
        return [(asked.head, request) for asked in self.asked for request in asked.late(now_s)]

    def redirected(self, now_s: float) -> Outbox:
        """The requests to send again because another copy heads the chain now."""
        heads = [(self.chains[shard][0], asked) for shard, asked in self.live]
        return [(head, request) for head, asked in heads if head != asked.head for request in asked.ask(head, now_s)]


class Reshaper:
    """Layouts: shard s holds the ranges `spans[s]` of `parameters`, () if it was drained."""

    def __init__(self, parameters: Sequence[Parameter] = (), spans: Sequence[Spans] = ()) -> None:
        self.parameters, self.spans = tuple(parameters), tuple(spans)
        self.layout = 0
        """The number of changes of `spans` so far."""
        self._planned: deque[Change] = deque()
        self._absent: set[int] = set()
        self._change: Change | None = None
        self._steps: Iterator[Orders] = iter(())
        self._lent: list[Lent] = []

    # ------------------------------------------------------------------ planned changes

    def add(self, nodes: Sequence[int]) -> None:
        """Plan a new shard with copies on `nodes`. It begins when each of them has sent a message."""
        if not nodes:
            raise ValueError("a shard needs a node for its copy")
        self._check()
        self._planned.append(Change(with_shard_added(self.parameters, self.last), nodes=tuple(nodes)))
        self._absent.update(nodes)

    def drain(self, shard: int) -> None:
        """Plan the end of shard `shard`."""
        self._check()
        last = self.last
        if not 0 <= shard < len(last) or not last[shard]:
            holders = [number for number, spans in enumerate(last) if spans]
            raise ValueError(f"shard {shard} holds nothing that others could take over; drain one of {holders}")
        self._planned.append(Change(with_shard_drained(self.parameters, last, shard), drained=shard))

    def _check(self) -> None:
        if not self.spans:
            raise ValueError("this coordinator does not know its shards' ranges; give parameters=… and spans=…")
        tables = [parameter.name for parameter in self.parameters if parameter.row_width]
        if tables:
            raise ValueError(f"tables with sparse gradients do not move, and {tables[0]} is one; use sparse=False")

    @property
    def last(self) -> tuple[Spans, ...]:
        """The ranges of each shard after all planned changes."""
        present = self.spans if self._change is None else self._change.target
        return self._planned[-1].target if self._planned else present

    def note_alive(self, node: int) -> None:
        """`node` lives."""
        self._absent.discard(node)

    def lose(self, node: int) -> int | None:
        """`node` is lost. The planned shard that this leaves without any copy; None if there is none."""
        self._absent.discard(node)
        for place, change in enumerate(self._planned):
            if node in change.nodes:
                left = tuple(other for other in change.nodes if other != node)
                self._planned[place] = change._replace(nodes=left)
                return None if left else len(self.spans) + place
        return None

    @property
    def absent(self) -> frozenset[int]:
        """Nodes of planned shards that have not sent a message."""
        return frozenset(self._absent)

    @property
    def busy(self) -> bool:
        """True if a change is planned or under way."""
        return bool(self._planned) or self.moving

    @property
    def ready(self) -> bool:
        """True if the next change can begin as soon as no request is under way."""
        return bool(self._planned) and not self.moving and self._absent.isdisjoint(self._planned[0].nodes)

    @property
    def moving(self) -> bool:
        """True if a change is under way: then the shards get no other request."""
        return self._change is not None

    # ------------------------------------------------------------------ the change under way

    def take(self, reply: Lent) -> None:
        """A giver's answer to `Lend` has come."""
        if self.moving:
            self._lent.append(reply)

    def go_on(self, is_still: bool, shards: Shards) -> tuple[int, ...] | None:
        """Begin, go on, or end, as far as that is possible.

        Returns None, or, if the view has changed, the nodes that must get it although they are not in it any more.
        """
        if self.ready and is_still:
            change = self._change = self._planned.popleft()
            self._steps = self._orders(change)
            if change.nodes:  # known by its chain before anything is asked of it
                shards.chains.append(change.nodes)
                shards.asked.append(shards.asked[0].beside(change.nodes[0]))
                shards.known.append(min(shards.known))
            return ()
        while self._change is not None and not shards.busy:
            orders = next(self._steps, None)
            if orders is None:
                return self._end(self._change, shards)
            for shard, build in orders:
                shards.asked[shard].add(build)
        return None

    def _end(self, change: Change, shards: Shards) -> tuple[int, ...]:
        """The change is done: its layout is the present one. Returns the nodes of a shard that was drained."""
        self._change, self._lent = None, []
        self.spans, self.layout = change.target, self.layout + 1
        if change.drained < 0:
            return ()
        gone, shards.chains[change.drained] = shards.chains[change.drained], ()
        shards.known[change.drained] = maxsize
        return gone

    def _orders(self, change: Change) -> Iterator[Orders]:
        after, drained = change.target, change.drained
        before = self.spans if drained >= 0 else (*self.spans, ())
        takers = [shard for shard, spans in enumerate(after) if not covers(before[shard], spans)]
        givers = [shard for shard, spans in enumerate(before) if not covers(after[shard], spans)]
        if drained >= 0:
            yield [(drained, Inquire)]  # its statistics: it does not exist at the end of the run
        pairs = [(giver, common(before[giver], after[taker])) for taker in takers for giver in givers]
        yield [(giver, partial(_lend, spans)) for giver, spans in pairs if spans]
        pieces = sorted(self._lent, key=lambda lent: (lent.shard, lent.spans))
        yield [(shard, partial(_reshape, after[shard], _for(after[shard], pieces))) for shard in takers]
        yield [(shard, partial(_reshape, after[shard], ())) for shard in givers]


def _for(spans: Spans, pieces: Sequence[Lent]) -> tuple[Lent, ...]:
    return tuple(piece for piece in pieces if common(spans, piece.spans))


def _lend(spans: Spans, worker: int, life: int, sequence: int) -> Lend:
    return Lend(worker, life, sequence, spans)


def _reshape(spans: Spans, pieces: tuple[Lent, ...], worker: int, life: int, sequence: int) -> Reshape:
    return Reshape(worker, life, sequence, spans, pieces)
