"""`MessageOrder`: lets messages into a machine of a replay in the recorded order. Early messages are held back.

    push of worker 1 ──▶ ┌ order ───────────────────────────┐
    pull of worker 0 ──▶ │ record: pull of worker 0, then   │──▶ pull of worker 0, push of worker 1 ──▶ shard 0
                         │ push of worker 1                 │
                         └──────────────────────────────────┘

Each machine is deterministic and so is each worker, so the replay can always go on to the end of the records: earlier
entries of the run cause the messages of the next entry.

Two parts of a worker's messages depend on the arrival of answers, and are taken from the record: the version in a push
that overlaps with a pull, and the call for work that names a finished ticket.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from polytempo.core.arithmetic.ranges import Ranges
from polytempo.replay.entries import (
    Key,
    as_recorded,
    difference_of,
    key_of_entry,
    key_of_message,
    keys_of_parts,
    words,
)
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.message import COORDINATOR, Deal, Elapsed, Message, Outbox, Push, Pushed, Reply, Request, View
from polytempo.server.record import (
    Asking,
    Elapsing,
    Entry,
    HostPushEntry,
    Lost,
    PushEntry,
    Saving,
    Stopping,
    entry_of,
    requests_of,
)
from polytempo.server.shard.node import Node

Life = tuple[int, int]
"""A worker and its incarnation."""

CUE = View(0, (), ())
"""The message that begins the program of a life, and later ends it, when all its entries are replayed."""


class Fate(NamedTuple):
    """The outcome of a push: its staleness when it was used, the verdict and its reason."""

    staleness: int
    verdict: str
    reason: str


class Arrived(NamedTuple):
    """A push that a shard has applied."""

    shard: int
    number: int
    """The number of its entry in the shard's log."""
    version: int
    """The shard's version before it."""
    entry: PushEntry


class Stop(NamedTuple):
    """The end of a replay before the end of the records.

    "step": when every batch of the first so many steps has been pushed to shard 0 (a step is as many tickets as there
    are workers, as in the metrics); "ticket": when that ticket has been; "version": when shard 0 has been updated so
    often.
    """

    kind: str
    number: int


class ReplayProgress:
    """The common state of all machines of a replay: the rank of each life, its tickets, and the progress."""

    def __init__(self, rank_of: dict[Life, int], entries_of: Counter[Life], workers: int, stop: Stop | None) -> None:
        self.rank_of, self.entries_of = rank_of, entries_of
        self.workers, self.stop = workers, stop
        self.difference: str | None = None
        """The first difference between the replay and the record."""
        self.stopped = False
        self.pushed = Ranges()
        """Tickets that have been pushed to shard 0."""
        self.begun: set[Life] = set()
        self.dealt: dict[Life, list[int]] = {life: [] for life in rank_of}
        self.verdicts: dict[tuple[int, Life, int], Fate] = {}
        """(shard, life, sequence) -> the outcome of that push."""
        self.squares: dict[tuple[Life, int, tuple[int, ...]], float] = defaultdict(float)
        """(life, clock, tickets) -> the squared norm of that gradient, summed over shards."""

    @property
    def over(self) -> bool:
        """True if machines take no more messages."""
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
        """One more entry of a life was replayed; after the last one its program gets the cue to end."""
        self.entries_of[life] -= 1
        return [(self.rank_of[life], CUE)] if not self.entries_of[life] and life in self.rank_of else []

    def addressed(self, out: Outbox) -> Outbox:
        """Messages to workers, addressed to the ranks of their lives. Views are left out: no copy moves in a replay."""
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
        """Add one shard's part to the norm of a gradient: `gradient` is the part in the push."""
        key = (entry.worker, entry.incarnation), entry.clock, entry.tickets
        for part in (gradient, *(rows.values for rows in push.rows)):
            self.squares[key] += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2

    def check_stop(self, version: int) -> None:
        """ValueError for a stop that came before the snapshot that a resumed run went on from.

        Call it once `pushed` has the snapshot's pushes; `version` is shard 0's there.
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

    def note_push(self, entry: PushEntry, version: int) -> None:
        """Shard 0 has taken a push in; stop if that is where to."""
        parts = entry.parts if isinstance(entry, HostPushEntry) else ()
        tickets = [*entry.tickets, *(ticket for part in parts for ticket in part.tickets)]
        for ticket in tickets:
            self.pushed.add(ticket)
        if self.stop is None:
            return
        kind, number = self.stop
        match kind:
            case "step":
                self.stopped = self.pushed.covers(0, number * self.workers - 1)
            case "ticket":
                self.stopped = number in tickets
            case "version":
                self.stopped = version >= number


class OrderedMachine(Protocol):
    """A machine that takes messages by the record."""

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        """Take `message`, the one of `entry`; None: perform an entry without a message."""

    def pass_by(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message that is in no record."""

    def missing(self, entry: Entry) -> Outbox:
        """The messages that cause the message of `entry`."""


@final
class MessageOrder:
    """A machine (`server.loop.Machine`) that takes the messages of `entries`, in that order."""

    def __init__(
        self, name: str, entries: Sequence[Entry], machine: OrderedMachine, progress: ReplayProgress, first: int = 1
    ) -> None:
        self.name, self.entries = name, entries
        self.passed = 0
        """The number of replayed entries."""
        self.finished = False
        self._machine, self._progress, self._first = machine, progress, first
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
        """Hold the message until its turn, and take all messages that have their turn now."""
        key = key_of_message(message)
        if key is None:
            return self._progress.addressed(self._machine.pass_by(now_s, source, message))
        self._held[key] = message
        return self._take_due(now_s)

    def tick(self, now_s: float) -> Outbox:
        """Take the first entries that need no message."""
        return self._take_due(now_s)

    def wait_s(self, now_s: float) -> float:
        """Infinite: a replay has no timers."""
        return float("inf")

    def flops(self, message: Message) -> float:
        """0: a replay takes no virtual time."""
        return 0.0

    def _take_due(self, now_s: float) -> Outbox:
        progress, out = self._progress, Outbox()
        while not progress.over and self.passed < len(self.entries):
            entry = self.entries[self.passed]
            key = key_of_entry(entry)
            keys = [] if key is None else [key, *keys_of_parts(entry)]
            if any(each not in self._held for each in keys):
                return out + self._machine.missing(entry)
            messages = [self._held.pop(each) for each in keys]
            out += progress.addressed(self._machine.enter(now_s, entry, as_recorded(entry, messages)))
            for request in requests_of(entry):
                out += progress.done((request.worker, request.incarnation))
            self.passed += 1
        return out


@final
class OrderedShard:
    """The only copy of one shard, which takes messages by the record."""

    def __init__(self, node: Node, progress: ReplayProgress) -> None:
        self._node, self._progress = node, progress
        self.order: MessageOrder | None = None
        self.pushes: list[Arrived] = []

    @property
    def version(self) -> int:
        """The shard's version."""
        return self._node.shard.version

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        """See `OrderedMachine`. Compares the outcome with the record."""
        assert self.order is not None
        shard, progress = self._node.shard, self._progress
        read = before = shard.version
        if isinstance(entry, Elapsing):
            out = self._node.elapse(now_s)
            replayed = entry_of(Elapsed(before), shard.version)
        else:
            assert isinstance(message, Request)
            read = shard.version_of(message.worker)
            out = self._node.receive(now_s, message.worker, message)
            replayed = entry_of(message, shard.version)
        if replayed != entry:
            progress.differs(self.order.where, difference_of(entry, replayed))
        if isinstance(message, Push) and isinstance(entry, PushEntry):
            self.pushes.append(Arrived(shard.number, shard.index, read, entry))
            progress.add_square(entry, message, shard.gradient_of(message))
            if shard.number == 0:
                progress.note_push(entry, shard.version)
        return out

    def pass_by(self, now_s: float, source: int, message: Message) -> Outbox:
        """See `OrderedMachine`."""
        return self._node.receive(now_s, source, message)

    def missing(self, entry: Entry) -> Outbox:
        """See `OrderedMachine`."""
        return []


@final
class OrderedCoordinator:
    """The coordinator, which takes messages by the record."""

    def __init__(self, coordinator: Coordinator, progress: ReplayProgress) -> None:
        self._coordinator, self._progress = coordinator, progress

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        """See `OrderedMachine`. The loss of a copy changes nothing: the shards of a replay have one copy each."""
        if isinstance(entry, Lost):
            return self._coordinator.lose(now_s, entry.node) if entry.node < self._progress.workers else []
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
        return self._progress.begin((entry.worker, entry.incarnation)) if isinstance(entry, Asking) else []
