"""Gates: what may enter a machine of a replay, and when. Messages that come before their turn are held.

    push of worker 1 ──▶ ┌ gate ────────────────────────────┐
    pull of worker 0 ──▶ │ record: pull of worker 0, then   │──▶ pull of worker 0, push of worker 1 ──▶ shard 0
                         │ push of worker 1                 │
                         └──────────────────────────────────┘

Each machine is deterministic and so is each worker, so the replay can always go on to where the records end: what the
next entry needs is sent because of entries that came before it in the run.

Two things in a worker's messages depend on when answers reached it, and are taken from the record: which version a push
that overlaps with a pull names, and in which call for work a finished ticket is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

import torch
from msgspec.structs import asdict, replace
from torch import Tensor

from polytempo.core.ranges import Ranges
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.message import COORDINATOR, Ask, Deal, Message, Noted, Outbox, Push, Pushed, Reply, Request, View
from polytempo.server.record import (
    Asking,
    Enrolling,
    Entry,
    Inquiring,
    Lost,
    Noting,
    PullEntry,
    PushEntry,
    Saving,
    Stopping,
    entry_of,
)
from polytempo.server.shard.node import Node

Life = tuple[int, int]
"""A worker and its incarnation."""
Key = tuple[str | int, int, int]

CUE = View(0, (), ())
"""Tells the program of a life to begin, and later that all that it did in the run is done."""


class Fate(NamedTuple):
    """What became of a push: its staleness when it was used, the verdict and its reason."""

    staleness: int
    verdict: str
    reason: str


class Arrived(NamedTuple):
    """A push that a shard has taken in."""

    shard: int
    number: int
    """Which entry of the shard's log it is."""
    version: int
    """The shard's, before."""
    entry: PushEntry


class Stop(NamedTuple):
    """Where a replay is to stop.

    "step": when every batch of the first so many steps has been pushed to shard 0 (a step is as many tickets as there
    are workers, as in the metrics); "ticket": when that ticket has been; "version": when shard 0 has been updated so
    often.
    """

    kind: str
    number: int


class ReplayProgress:
    """What all gates of a replay share: who plays whom, and how far everybody is."""

    def __init__(self, rank_of: dict[Life, int], entries_of: Counter[Life], workers: int, stop: Stop | None) -> None:
        self.rank_of, self.entries_of = rank_of, entries_of
        self.workers, self.stop = workers, stop
        self.difference: str | None = None
        """The first place at which the replay was not as the record says."""
        self.stopped = False
        self.pushed = Ranges()
        """Tickets that have been pushed to shard 0."""
        self.begun: set[Life] = set()
        self.dealt: dict[Life, list[int]] = {life: [] for life in rank_of}
        self.verdicts: dict[tuple[int, Life, int], Fate] = {}
        """(shard, life, sequence) -> what became of that push."""
        self.squares: dict[tuple[Life, int, tuple[int, ...]], float] = defaultdict(float)
        """(life, clock, tickets) -> the squared norm of that gradient, summed over shards."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be let in."""
        return self.stopped or self.difference is not None

    def differs(self, where: str, how: str) -> None:
        """Note a difference; only the first counts."""
        if self.difference is None:
            self.difference = f"{where}: {how}"

    def begin(self, life: Life) -> Outbox:
        """Let a life begin, once."""
        if life in self.begun or life not in self.rank_of:
            return []
        self.begun.add(life)
        return [(self.rank_of[life], CUE)]

    def done(self, life: Life) -> Outbox:
        """One more entry of a life was let in; after the last one it is told."""
        self.entries_of[life] -= 1
        return [(self.rank_of[life], CUE)] if not self.entries_of[life] and life in self.rank_of else []

    def addressed(self, out: Outbox) -> Outbox:
        """Messages to workers, to those who play them. They need no views: nobody moves in a replay."""
        sent: Outbox = []
        for to, message in out:
            if isinstance(message, Deal) or (isinstance(message, Reply) and message.worker != COORDINATOR):
                life = message.worker, message.incarnation
                if life in self.rank_of:
                    sent.append((self.rank_of[life], message))
                if isinstance(message, Deal) and life in self.dealt:
                    self.dealt[life] += [ticket.number for ticket in message.tickets]
                if isinstance(message, Pushed):
                    became = Fate(message.staleness, message.verdict, message.reason)
                    self.verdicts[message.shard, life, message.sequence] = became
            elif not isinstance(message, View) or to >= self.workers:
                sent.append((to, message))
        return sent

    def add_square(self, entry: PushEntry, push: Push, gradient: Tensor) -> None:
        """Add one shard's part to the norm of a gradient: `gradient` is what the push carries."""
        key = (entry.worker, entry.incarnation), entry.clock, entry.tickets
        for part in (gradient, *(rows.values for rows in push.rows)):
            self.squares[key] += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2

    def check_stop(self, version: int) -> None:
        """ValueError for a stop that came before the snapshot that a resumed run went on from.

        Call it once `pushed` has what is in the snapshot; `version` is shard 0's there.
        """
        if self.stop is None:
            return
        kind, number = self.stop
        last = self.pushed.tuples[0][1] if self.pushed.covers(0, 0) else -1
        begins = {"step": (last + 1) // self.workers + 1, "ticket": last + 1, "version": version + 1}[kind]
        if self.pushed.covers(number, number) if kind == "ticket" else number < begins:
            raise ValueError(
                f"the run was resumed, and its record begins at {kind} {begins}: a replay cannot stop at "
                f"{kind}={number}; give {kind}={begins} or more"
            )

    def has_pushed(self, entry: PushEntry, version: int) -> None:
        """Shard 0 has taken a push in; stop if that is where to."""
        for ticket in entry.tickets:
            self.pushed.add(ticket)
        if self.stop is None:
            return
        kind, number = self.stop
        match kind:
            case "step":
                self.stopped = self.pushed.covers(0, number * self.workers - 1)
            case "ticket":
                self.stopped = number in entry.tickets
            case "version":
                self.stopped = version >= number


class OrderedMachine(Protocol):
    """The way into one machine."""

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        """Let `message` in as `entry` says, or do what `entry` says without one."""

    def pass_by(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take what is in no record."""

    def missing(self, entry: Entry) -> Outbox:
        """What can be done so that the message of `entry` comes."""


@final
class MessageOrder:
    """A machine (`server.loop.Machine`) that takes in what `entries` say, in that order."""

    def __init__(
        self, name: str, entries: Sequence[Entry], door: OrderedMachine, play: ReplayProgress, first: int = 1
    ) -> None:
        self.name, self.entries = name, entries
        self.passed = 0
        """How many entries were let in."""
        self.finished = False
        self._door, self._play, self._first = door, play, first
        self._held: dict[Key, Message] = {}

    @property
    def waits_for(self) -> str:
        """The entry that is next, in words; "" at the end of the record."""
        if self.passed == len(self.entries):
            return ""
        return f"{self.where} of {self._first + len(self.entries) - 1}: {words(self.entries[self.passed])}"

    @property
    def where(self) -> str:
        """The number of the entry that is next, in words."""
        return f"{self.name}, entry {self._first + self.passed}"

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Hold the message until it is its turn, and let in whose turn has come."""
        key = key_of_message(message)
        if key is None:
            return self._play.addressed(self._door.pass_by(now_s, source, message))
        self._held[key] = message
        return self._let_in(now_s)

    def tick(self, now_s: float) -> Outbox:
        """Once, at the beginning."""
        return self._let_in(now_s)

    def wait_s(self, now_s: float) -> float:
        """A replay knows no time."""
        return float("inf")

    def flops(self, message: Message) -> float:
        """Nor does anything take any."""
        return 0.0

    def _let_in(self, now_s: float) -> Outbox:
        play, out = self._play, Outbox()
        while not play.over and self.passed < len(self.entries):
            entry = self.entries[self.passed]
            key = key_of_entry(entry)
            message = None if key is None else self._held.pop(key, None)
            if key is not None and message is None:
                return out + self._door.missing(entry)
            expected = None if message is None else as_recorded(entry, message)
            out += play.addressed(self._door.enter(now_s, entry, expected))
            if isinstance(entry, PushEntry | PullEntry | Asking):
                out += play.done((entry.worker, entry.incarnation))
            self.passed += 1
        return out


def key_of_message(message: Message) -> Key | None:
    """What a message and its entry have in common; None for messages that are in no record."""
    if isinstance(message, Request | Ask):
        return message.worker, 0 if message.worker == COORDINATOR else message.incarnation, message.sequence
    return ("noted", message.shard, message.sequence) if isinstance(message, Noted) else None


def key_of_entry(entry: Entry) -> Key | None:
    """The same of an entry; None for what happened without a message."""
    match entry:
        case PushEntry() | PullEntry() | Asking():
            return entry.worker, entry.incarnation, entry.sequence
        case Noting():
            return "noted", entry.shard, entry.sequence
        case Enrolling() | Inquiring() | Saving() if entry.sequence:
            return COORDINATOR, 0, entry.sequence
    return None


def as_recorded(entry: Entry, message: Message) -> Message:
    """The message with what depends on the arrival of answers as it was; see the module's text."""
    if isinstance(entry, PushEntry) and isinstance(message, Push):
        return replace(message, basis=entry.basis)
    if isinstance(entry, Asking) and isinstance(message, Ask):
        return replace(message, done=entry.done)
    return message


def words(entry: Entry) -> str:
    """An entry as a person reads it."""
    match entry:
        case PushEntry():
            return f"push of worker {entry.worker} (life {entry.incarnation}, tickets {list(entry.tickets)})"
        case PullEntry():
            return f"pull of worker {entry.worker} (life {entry.incarnation}, step {entry.clock})"
        case Asking():
            return f"call number {entry.sequence} for work by worker {entry.worker} (life {entry.incarnation})"
        case Lost():
            return f"loss of node {entry.node}"
        case Stopping():
            return "the end of the run, for a score was good enough"
        case Noting():
            return f"shard {entry.shard}'s answer to request {entry.sequence} of the coordinator"
    return f"request {entry.sequence} of the coordinator ({type(entry).__struct_config__.tag})"


def difference_of(recorded: Entry, replayed: Entry) -> str:
    """Which fields differ, with both values."""
    if type(recorded) is not type(replayed):
        return f"recorded as {words(recorded)}, replayed as {words(replayed)}"
    other = asdict(replayed)
    fields = [f"{k} recorded as {v}, replayed as {other[k]}" for k, v in asdict(recorded).items() if v != other[k]]
    return f"{words(recorded)}: {'; '.join(fields)}"


@final
class OrderedShard:
    """The way into the only copy of one shard."""

    def __init__(self, node: Node, play: ReplayProgress) -> None:
        self._node, self._play = node, play
        self.gate: MessageOrder | None = None
        self.pushes: list[Arrived] = []

    @property
    def version(self) -> int:
        """The shard's."""
        return self._node.shard.version

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        """See `OrderedMachine`. Compares what came of it with the record."""
        assert isinstance(message, Request)
        assert self.gate is not None
        shard, play = self._node.shard, self._play
        before = shard.version
        out = self._node.receive(now_s, message.worker, message)
        replayed = entry_of(message, shard.version)
        if replayed != entry:
            play.differs(self.gate.where, difference_of(entry, replayed))
        if isinstance(message, Push) and isinstance(entry, PushEntry):
            self.pushes.append(Arrived(shard.number, shard.index, before, entry))
            play.add_square(entry, message, shard.gradient_of(message))
            if shard.number == 0:
                play.has_pushed(entry, shard.version)
        return out

    def pass_by(self, now_s: float, source: int, message: Message) -> Outbox:
        """See `OrderedMachine`."""
        return self._node.receive(now_s, source, message)

    def missing(self, entry: Entry) -> Outbox:
        """See `OrderedMachine`."""
        return []


@final
class OrderedCoordinator:
    """The way into the coordinator."""

    def __init__(self, coordinator: Coordinator, play: ReplayProgress) -> None:
        self._coordinator, self._play = coordinator, play

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        """See `OrderedMachine`. The loss of a copy is no matter here: the shards of a replay live."""
        if isinstance(entry, Lost):
            return self._coordinator.lose(now_s, entry.node) if entry.node < self._play.workers else []
        if isinstance(entry, Saving):
            return self._coordinator.save(now_s, entry.number)
        if isinstance(entry, Stopping):
            self._coordinator.stop()
            return self._coordinator.tick(now_s)
        assert message is not None
        return self._coordinator.receive(now_s, getattr(message, "worker", COORDINATOR), message)

    def pass_by(self, now_s: float, source: int, message: Message) -> Outbox:
        """See `OrderedMachine`."""
        return self._coordinator.receive(now_s, source, message)

    def missing(self, entry: Entry) -> Outbox:
        """A life begins when its first call is due."""
        return self._play.begin((entry.worker, entry.incarnation)) if isinstance(entry, Asking) else []
