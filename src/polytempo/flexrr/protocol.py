"""Rapid reassignment between workers: FlexRR's peer, without I/O, and the step around it, the same in both worlds.

A worker does its slices from the front. A worker that is well behind a helper gives it slices from the end. There is
no coordinator. Messages may be lost, doubled, delayed and may overtake each other.

    helper  ── Progress ──▶ helpee      every 5 % of its own share (every slice, to whom it has helped in this clock),
                                        at the beginning, and now and then once that is covered
            ◀── DoThis ────             to a helper that is ahead, if the helpee is well behind
            ── BegunHelping ──▶         before it computes; answered with the next, larger DoThis
            ── Helped ──▶               when the slice's gradient is pushed: it arrives if the helper lives
            ◀── Cancel ────             when the helpee has hardly anything left: may I have this one back?
            ── CancelGranted ──▶        I had not begun

A helper's table (it keeps one line for each slice until the helpee is at a later clock):

| the slice is      | at DoThis               | at Cancel                | when it has time                    |
|-------------------|-------------------------|--------------------------|-------------------------------------|
| unknown           | queued; too many: returned, `CancelGranted` | returned, `CancelGranted` |                  |
| queued            | nothing                 | returned, `CancelGranted`| begun, `BegunHelping`               |
| begun             | `BegunHelping`          | `BegunHelping`           | computes, pushes, helped, `Helped`  |
| helped            | `Helped`                | `Helped`                 |                                     |
| returned          | `CancelGranted`         | `CancelGranted`          | never begins it                     |
| of an old clock   | nothing                 | nothing                  | never begins it                     |

Its helpee's table:

| the slice is | at BegunHelping | at Helped | at CancelGranted | in time                                            |
|--------------|-----------------|-----------|------------------|----------------------------------------------------|
| mine         | nothing         | nothing   | nothing          | does it, or gives it away by `DoThis`: offered     |
| offered      | begun           | done      | returned         | repeats `DoThis`; out of work: `Cancel`, recalled  |
| recalled     | begun           | done      | returned         | repeats `Cancel`                                   |
| begun        | nothing         | done      | nothing          | repeats `DoThis`                                   |
| returned     | nothing         | nothing   | nothing          | does it, as its own; never gives it away again     |
| contested    | nothing         | done      | nothing          | does it, alone                                     |

Any slice that is offered, recalled or begun becomes contested when the helpee has waited idly for `patience` times
as long as doing it would have taken.

Promises, and who keeps them:

- *The peers*: a slice is in at most one push that is not alone, and if no slice was ever contested it is executed
  exactly once. The right to execute it is the helpee's until DoThis, the helper's from its arrival, and the helpee's
  again only by CancelGranted: then the helper never begins it. Lives are numbered, so an answer of a helper's
  next life, which does not know the work of the one before, is ignored.
- *The peers*: a helpee never waits for ever, though any peer may die or fall silent: it contests. The pushes of a lost
  helper may be lost with it, so their slices are contested as well (`Peer.lost`), until the helpee's next clock.
- *The shards*: a contested slice, a slice of a ticket that is dealt again, and a helper's slice are each pushed alone,
  under the slice's own ticket (`slices.ticket_of`). A shard that has it already drops it. So each sample counts
  once, and a second execution costs time only. The shards' ledger is the authority.

The helper's own clock does not advance: the gradient is pushed for the helpee's.

Source: A. Harlap et al., "Addressing the straggler problem for iterative convergent parallel ML", SoCC 2016 (rapid
reassignment). Ours and not the paper's: Helped, CancelGranted, repeats, lives and contests (the paper trusts its
transport); a helpee asks for a slice back before it does it; an offer is at most a fair part of the rest; helpers
are the next workers on a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from polytempo.core import Port
from polytempo.core.op import Parcel
from polytempo.flexrr.giving import Giving
from polytempo.flexrr.helping import Helping, Position
from polytempo.flexrr.reassignment import Reassignment, helpees_of, helpers_of
from polytempo.flexrr.slices import BegunHelping, Cancel, CancelGranted, DoThis, Helped, Progress, Slice
from polytempo.server.message import Message, Outbox, Ticket

_REMEMBERED = 9
"""Slices in the median of the pace: one long pause does not raise it."""


class Do(NamedTuple):
    """Compute the gradient of `slice`, of the batch `ticket`.

    `alone`: push it immediately, for clock `slice.clock`, with no other, under `ticket_of(slice, …)`. It is finished
    when that push is on its way (a synchronous rule answers it after the whole step). Otherwise it is this worker's
    own, to be pushed with others of its own.
    """

    slice: Slice
    ticket: Ticket | None
    alone: bool


class Peer:
    """One worker among its helpers and helpees. Times are seconds of one clock, given by the caller."""

    def __init__(self, worker: int, members: Sequence[int], parameters: Reassignment, incarnation: int = 1) -> None:
        self.worker = worker
        self.parameters = parameters
        self._incarnation = incarnation
        self._giving = Giving(worker, incarnation, parameters)
        self._helping = Helping(incarnation, capacity=parameters.slices)
        self._covered_clock: dict[int, int] = {}
        self._heard_s: dict[int, float] = {}
        self._began_s = 0.0
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._reported_s = -inf
        self._reported = 0.0
        self._helped: set[int] = set()
        self.helpers: tuple[int, ...] = ()
        self.regroup(members)

    def regroup(self, members: Sequence[int]) -> None:
        """Set the members. Helpers that are members no more are `lost`."""
        for helper in set(self.helpers) - set(members):
            self.lost(helper)
        self.helpers = helpers_of(self.worker, members, self.parameters.helpers)
        self.helpees = helpees_of(self.worker, members, self.parameters.helpers)
        self._neighbours = tuple(dict.fromkeys((*self.helpees, *self.helpers)))

    def lost(self, helper: int) -> None:
        """Contest the slices of `helper`, which has died or begun a new life, so that `covered` may end."""
        self._giving.lost(helper)

    # ------------------------------------------------------------------ a worker's own work

    def start(self, now_s: float, clock: int, samples: int, ticket: Ticket | None = None) -> Outbox:
        """Begin `clock` with `samples` to do. The clock before must be covered."""
        if not self.covered or clock <= self._giving.clock:
            raise ValueError(
                f"worker {self.worker} cannot start clock {clock}: clock {self._giving.clock} is "
                f"{'over' if self.covered else 'not covered'}; call start once per clock, after `covered`"
            )
        self._giving.start(clock, samples, ticket)
        self._reported = 0.0
        self._helped.clear()
        for helpee in self.helpees:
            self._covered_clock.setdefault(helpee, clock - 1)
        return self._report(now_s, self._neighbours)

    def next(self, now_s: float) -> tuple[Do | None, Outbox]:
        """Return the next slice: first slices of workers that are behind, then its own. None: nothing to do."""
        self._began_s = now_s
        if (theirs := self._helping.begin()) is not None:
            piece, ticket = theirs
            return Do(piece, ticket, alone=True), [(piece.helpee, BegunHelping(piece, *self._position))]
        if (own := self._giving.begin()) is not None:
            return Do(*own), self._giving.recall(now_s, self._pace_s)
        return None, []

    def finished(self, now_s: float, piece: Slice) -> Outbox:
        """Note that the slice from `next` is done."""
        self._seconds.append(now_s - self._began_s)
        if piece.helpee != self.worker:
            self._helping.finish(piece)
            self._helped.add(piece.helpee)
            return [(piece.helpee, Helped(piece))]
        self._giving.finish(piece)
        return self._report_if_due(now_s)

    @property
    def covered(self) -> bool:
        """True when every slice of this clock is done by this worker, or pushed by a helper."""
        return self._giving.covered

    @property
    def expects_back(self) -> bool:
        """True while more slices may come back, to be pushed with its own: ask before pushing, to push once."""
        return self._giving.expects_back

    def may_go_on(self, now_s: float) -> bool:
        """True when all helpees are near enough, or silent."""
        silent_s = now_s - self.parameters.silence_s
        return self.covered and all(self._heard_s.setdefault(helpee, now_s) < silent_s for helpee in self._needy)

    # ------------------------------------------------------------------ messages

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Answer a message. Messages of other kinds, and of workers that are neither helper nor helpee, are ignored."""
        outbox: Outbox = []
        was_covered = self.covered
        if source in self.helpees:
            outbox += [(source, answer) for answer in self._as_helper(now_s, source, message)]
        if source in self.helpers:
            outbox += self._as_helpee(now_s, source, message)
        if self.covered and not was_covered:
            outbox += self._report_if_due(now_s)
        return outbox

    def _as_helper(self, now_s: float, helpee: int, message: Message) -> list[Message]:
        match message:
            case Progress():
                self._is_at(now_s, helpee, message.incarnation, message.clock, message.fraction >= 1)
            case DoThis() if message.slices:
                self._is_at(now_s, helpee, message.slices[0].incarnation, message.slices[0].clock, False)
                return self._helping.do_this(helpee, message, self._position)
            case Cancel():
                self._is_at(now_s, helpee, message.slice.incarnation, message.slice.clock, False)
                return self._helping.cancel(helpee, message, self._position)
        return []

    def _is_at(self, now_s: float, helpee: int, incarnation: int, clock: int, covered: bool) -> None:
        self._heard_s[helpee] = now_s
        self._helping.at_clock(helpee, incarnation, clock)
        self._covered_clock[helpee] = max(self._covered_clock.get(helpee, -1), clock if covered else clock - 1)

    def _as_helpee(self, now_s: float, helper: int, message: Message) -> Outbox:
        match message:
            case Progress() if self.covered:
                return [(helper, Progress(*self._position))] if message.asks else []
            case Progress() | BegunHelping():
                if isinstance(message, BegunHelping):
                    self._giving.begun(helper, message.slice)
                position = Position(message.incarnation, message.clock, message.fraction)
                return self._giving.offer_to(now_s, helper, position)
            case Helped():
                self._giving.helped(helper, message.slice)
            case CancelGranted():
                self._giving.granted(helper, message.slice)
        return []

    # ------------------------------------------------------------------ time

    def tick(self, now_s: float) -> Outbox:
        """Repeat, recall, contest and report: call it between two slices, and when `wait_s` is over."""
        outbox = self._giving.recall(now_s, self._pace_s) + self._giving.ask_again(now_s)
        self._giving.contest(now_s, self._pace_s)
        if self.covered and now_s >= self._reported_s + self.parameters.report_s:
            self._reported_s = now_s
            outbox += [(helpee, Progress(*self._position, asks=True)) for helpee in self._needy]
        return outbox

    @property
    def _needy(self) -> list[int]:
        """Helpees not known to be near enough for this worker to go on."""
        least = self._giving.clock - self.parameters.slack
        return [helpee for helpee in self.helpees if self._covered_clock.get(helpee, least) < least]

    def wait_s(self, now_s: float) -> float:
        """The longest sleep, if no message comes, after `next` returned None."""
        latest_s = min(self.parameters.report_s, self.parameters.retry_s)
        return max(0.0, min(latest_s, self._giving.deadline_s(self._pace_s) - now_s))

    @property
    def _pace_s(self) -> float:
        return median(self._seconds) if self._seconds else self.parameters.retry_s

    @property
    def _position(self) -> Position:
        return Position(self._incarnation, self._giving.clock, self._giving.fraction)

    def _report_if_due(self, now_s: float) -> Outbox:
        if self.covered:
            return self._report(now_s, self._neighbours)
        if self._giving.fraction < self._reported + self.parameters.report_every:
            return [(helpee, Progress(*self._position)) for helpee in self.helpees if helpee in self._helped]
        return self._report(now_s, self.helpees)

    def _report(self, now_s: float, whom: Sequence[int]) -> Outbox:
        self._reported_s, self._reported = now_s, self._giving.fraction
        return [(other, Progress(*self._position)) for other in whom]


class CoveredWork(NamedTuple):
    """A worker's operations on slices, and the source of its peers' messages.

    `accumulate` computes a slice and adds its gradient to this worker's sum. `push` sends the sum for the slices named,
    each under its ticket; it is called with at least one slice, seldom twice in a clock. `alone` computes one slice and
    pushes it separately, under its ticket, for the slice's clock. Neither push may wait for an answer that comes after
    the step only (start it, and await it before the pull): a worker that waits there cannot help.
    """

    accumulate: Callable[[Do], Awaitable[None]]
    push: Callable[[list[Slice]], Awaitable[None]]
    alone: Callable[[Do], Awaitable[None]]
    take: Callable[[float], Awaitable[tuple[int, Parcel] | None]] | None = None
    """The next letter that comes within this many seconds; None: only peers use the mailbox. Called between any two
    slices, so it may also `regroup` the peer."""


async def covered_step(
    port: Port, peer: Peer, clock: int, samples: int, work: CoveredWork, ticket: Ticket | None = None
) -> None:
    """Do this worker's `samples` of `clock` with the help of others, and help workers that are behind.

    Ends when all of the share is with the shards and no helpee needs this worker in its clock; pull after that. It
    looks at its mail between slices, so a message waits for a slice at most. Messages that are not of peers are
    ignored.
    """
    await _post(port, peer.start(await port.now(), clock, samples, ticket))
    await cover(port, peer, work)


async def cover(port: Port, peer: Peer, work: CoveredWork) -> None:
    """Go on with `covered_step`: also when `peer.lost` has reopened slices of this clock."""
    own: list[Slice] = []
    while True:
        await _read_mail(port, peer, work)
        now_s = await port.now()
        await _post(port, peer.tick(now_s))
        do, outbox = peer.next(now_s)
        await _post(port, outbox)
        if do is not None:
            await (work.alone(do) if do.alone else work.accumulate(do))
            own += [] if do.alone else [do.slice]
            await _post(port, peer.finished(await port.now(), do.slice))
        elif own and not peer.expects_back:
            await work.push(own)
            own = []
        elif peer.may_go_on(now_s):
            return
        else:
            await _read_mail(port, peer, work, peer.wait_s(now_s))


async def _read_mail(port: Port, peer: Peer, work: CoveredWork, wait_s: float = 0.0) -> None:
    """Read all messages; if there is none, wait once for the next."""
    take = work.take or port.take
    while (letter := await take(wait_s)) is not None:
        source, message = letter
        if isinstance(message, Message):
            await _post(port, peer.receive(await port.now(), source, message))
        wait_s = 0.0


async def _post(port: Port, outbox: Outbox) -> None:
    for node, message in outbox:
        await port.post(message, node)
