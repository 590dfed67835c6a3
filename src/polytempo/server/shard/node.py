"""`Node`: one process's copy of one shard. Log, chain, fence; without I/O.

    worker ──Push──▶ head ──Replicate 7──▶ next copy ──▶ … ──▶ tail
           ◀─Pushed─      ◀─Replicated 7─            ◀─…

The head decides the order: every request becomes an entry of the log, and the head applies it immediately. It keeps the
replies until the last copy has the entry. So an acknowledged request is in every copy, and with two copies it survives
the loss of either.

The coordinator alone decides which nodes are in the chain, in views numbered by epoch. A copy takes entries only from
its predecessor in the view that it knows, and only of that epoch: a head that was deposed gets no entry acknowledged.

Source: R. van Renesse and F. B. Schneider, "Chain replication for supporting high throughput and availability", 2004;
we let the head answer, not the tail, for our reads are entries of the log as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from polytempo.server.message import (
    COORDINATOR,
    AskedEntry,
    Beat,
    Elapsed,
    Entry,
    Fenced,
    Inquire,
    Install,
    Lend,
    Members,
    Message,
    Outbox,
    Pull,
    Push,
    PushAlone,
    Replicate,
    Replicated,
    Reply,
    Reshape,
    Save,
    View,
)
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.snapshot import AskState, copy_of
from polytempo.server.timing import Timing

_BLANK = -1
"""The index that a copy without a state confirms."""
_WINDOW = 16
"""The most entries sent again together; the others follow when these are confirmed."""


class Node:
    """The copy of `shard` on node `node`. `blank`: it has no state yet and waits for its predecessor's.

    `on_entry(index, entry)` gets every entry as it is applied (a recorder); `on_save(number, shard)` writes a snapshot,
    on the head alone. `first_worker`: the node of worker 0's process that this shard serves; the others' follow it.
    """

    def __init__(
        self,
        node: int,
        shard: Shard,
        coordinator: int,
        timing: Timing | None = None,
        *,
        blank: bool = False,
        on_entry: Callable[[int, Entry], None] | None = None,
        on_save: Callable[[int, Shard], None] | None = None,
        first_worker: int = 0,
    ) -> None:
        self.node, self.shard, self.coordinator = node, shard, coordinator
        self._first_worker = first_worker
        self.timing = timing or Timing()
        self.epoch = 0
        self.chain: tuple[int, ...] = ()
        self.index = shard.index
        """The number of applied entries, with the entries before a loaded snapshot."""
        self.committed = shard.index
        """The number of entries that this copy and all behind it have applied."""
        self.blank = blank
        self.finished = False
        self._on_entry = on_entry or (lambda index, entry: None)
        self._on_save = on_save or (lambda number, shard: None)
        self._log: deque[Entry] = deque()
        """Entries that the next copy has not confirmed: the last of them is entry `index`."""
        self._sent = 0
        """The last entry that was sent to the next copy."""
        self._install: Install | None = None
        """The state on its way to the next copy, until that has it."""
        self._held: deque[tuple[int, list[Reply]]] = deque()
        """Replies by the entry that they wait for."""
        self._unsaid: set[tuple[int, int, int]] = set()
        """The requests with held replies."""
        self._silent_until = 0
        """After a promotion no answer is repeated before this entry is committed, because it may not be replicated
        yet."""
        self._due: Save | None = None
        """A snapshot that was ordered and is not due yet."""
        self._window: tuple[int, float] | None = None
        """The version of the weights in the rule's window, and the time of its end by this process's clock."""
        self._beat_at_s = 0.0
        self._retry_at_s = float("inf")
        self._patience_s = self.timing.retry_s

    # ------------------------------------------------------------------ place in the chain

    @property
    def is_head(self) -> bool:
        """True if workers ask this copy."""
        return bool(self.chain) and self.chain[0] == self.node and not self.blank

    @property
    def _successor(self) -> int | None:
        return self._beside(1)

    @property
    def _predecessor(self) -> int | None:
        return self._beside(-1)

    def _beside(self, step: int) -> int | None:
        if self.node not in self.chain:
            return None
        place = self.chain.index(self.node) + step
        return self.chain[place] if 0 <= place < len(self.chain) else None

    # ------------------------------------------------------------------ the machine

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message and return the messages to send."""
        out = self._receive(now_s, source, message)
        self._time_window(now_s)
        return out

    def _receive(self, now_s: float, source: int, message: Message) -> Outbox:
        match message:
            case Push() | Pull() | Members() | Save() | Inquire() | Lend() | Reshape():
                return self._request(now_s, message) if self.is_head else []
            case Replicate() if message.shard == self.shard.number:
                return self._replicate(now_s, source, message)
            case Replicated() if message.shard == self.shard.number:
                return self._confirmed(now_s, source, message)
            case Install() if message.shard == self.shard.number:
                return self._installed(now_s, source, message)
            case AskState() if self.is_head and self.committed == self.index:
                return [(source, copy_of(self.shard))]
            case View():
                return self._see(now_s, message)
            case Fenced() if message.epoch > self.epoch:
                self._beat_at_s = (
                    now_s  # the beat names this node's epoch; the coordinator answers with the newest view
                )
                return self.tick(now_s)
        return []

    def tick(self, now_s: float) -> Outbox:
        """Send a beat on time, and send unconfirmed entries again."""
        out: Outbox = []
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self.timing.beat_s
            out.append((self.coordinator, Beat(self.node, 0 if self.blank else 1, self.epoch)))
        if self._window is not None and now_s >= self._window[1]:
            out += self.elapse(now_s)
            self._time_window(now_s)
        if now_s >= self._retry_at_s:
            self._sent = self.index - len(self._log)
            out += self._feed(now_s, min(2 * self._patience_s, self.timing.longest_retry_s))
        return out

    def wait_s(self, now_s: float) -> float:
        """The time until the next `tick`, unless a message arrives."""
        ends_s = float("inf") if self._window is None else self._window[1]
        return max(0.0, min(self._beat_at_s, self._retry_at_s, ends_s) - now_s)

    def elapse(self, now_s: float) -> Outbox:
        """End the window of the shard's rule, by an entry, for copies have no common clock."""
        self._window = None
        return self._append(now_s, Elapsed(self.shard.version))

    def _time_window(self, now_s: float) -> None:
        """Time the rule's window on the first copy alone. A copy that becomes the first begins the window again."""
        window_s = self.shard.window_s if self.is_head else None
        if window_s is None:
            self._window = None
        elif self._window is None or self._window[0] != self.shard.version:
            self._window = self.shard.version, now_s + window_s

    def flops(self, message: Message) -> float:
        """The cost of `message`: about four operations for each element of a gradient, and the codec's."""
        if isinstance(message, Replicate):
            return self.flops(message.entry)
        service = self.shard.service
        if isinstance(message, Pull) and service.pull_codec is not None:
            return service.pull_codec.facts.flops / 2 * self.shard.weights.numel()
        if not isinstance(message, Push):
            return 0.0
        numel = self.shard.weights.numel()
        decoding = 0.0 if service.codec is None else service.codec.facts.flops / 2 * numel
        return decoding + 4.0 * (numel + sum(rows.values.numel() for rows in message.rows))

    # ------------------------------------------------------------------ entries

    def _request(self, now_s: float, request: AskedEntry) -> Outbox:
        status = self.shard.status_of(request)
        if status.kind == "new":
            return self._append(now_s, request)
        return self._addressed(reply for reply in status.replies if self._may_say(reply))

    def _may_say(self, reply: Reply) -> bool:
        """True if all copies have the answered entry, or if `reply` only refuses."""
        key = (reply.worker, reply.incarnation, reply.sequence)
        return isinstance(reply, PushAlone) or not (key in self._unsaid or self.committed < self._silent_until)

    def _append(self, now_s: float, entry: Entry) -> Outbox:
        """A new entry: apply it here, and send it to the next copy."""
        replies = self._apply(entry)
        if self._successor is None:
            self.committed = self.index
            return self._addressed(replies)
        if replies:
            self._held.append((self.index, replies))
            self._unsaid.update((r.worker, r.incarnation, r.sequence) for r in replies)
        self._log.append(entry)
        return self._feed(now_s, self._patience_s)

    def _apply(self, entry: Entry) -> list[Reply]:
        self.index += 1
        replies = self.shard.apply(entry)
        self._on_entry(self.index, entry)
        if isinstance(entry, Save):
            self._due = entry
        if self._due is not None and self.shard.decisions.batches >= self._due.at:
            due, self._due = self._due, None
            if self.is_head:
                self._on_save(due.number, self.shard)
        return replies

    def _addressed(self, replies: Iterable[Reply]) -> Outbox:
        return [(self.coordinator if r.worker == COORDINATOR else self._first_worker + r.worker, r) for r in replies]

    def _feed(self, now_s: float, patience_s: float) -> Outbox:
        """Send the next copy its state, or the entries that it has not been sent, a window at a time."""
        successor = self._successor
        if successor is None or (not self._log and self._install is None):
            self._retry_at_s = float("inf")
            return []
        self._patience_s, self._retry_at_s = patience_s, now_s + patience_s
        if self._install is not None:
            return [(successor, self._install)]
        first = self.index - len(self._log) + 1
        last = min(self.index, first + _WINDOW - 1)
        begin, self._sent = max(self._sent + 1, first), max(self._sent, last)
        number, epoch = self.shard.number, self.epoch
        return [(successor, Replicate(number, epoch, i, self._log[i - first])) for i in range(begin, last + 1)]

    # ------------------------------------------------------------------ replication

    def _replicate(self, now_s: float, source: int, message: Replicate) -> Outbox:
        if message.epoch < self.epoch:
            return [(source, Fenced(self.shard.number, self.epoch))]
        if message.epoch > self.epoch or source != self._predecessor:
            return []  # it will be sent again when the view has come
        if self.blank:
            return [(source, Replicated(self.shard.number, self.epoch, _BLANK))]
        if message.index > self.index + 1:
            return []  # so will this one, after the entry before it
        if message.index <= self.index:
            return self._confirm()
        self._apply(message.entry)
        if self._successor is None:
            self.committed = self.index
            return self._confirm()
        self._log.append(message.entry)
        return self._feed(now_s, self._patience_s)

    def _confirmed(self, now_s: float, source: int, message: Replicated) -> Outbox:
        if message.epoch != self.epoch or source != self._successor:
            return []
        if message.index == _BLANK and self._install is None:  # the copy that was to send it the state has died
            self._meet_successor(())
            return self._feed(now_s, self.timing.retry_s)
        if message.index <= self.committed and self._install is None:
            return []
        if self._install is not None:
            if message.index < self._install.index:
                return []
            self._install = None
            self._sent = message.index
        self._commit(min(message.index, self.index))
        out = self._feed(now_s, self.timing.retry_s)
        if self._predecessor is not None:
            return out + self._confirm()
        while self._held and self._held[0][0] <= self.committed:
            _, replies = self._held.popleft()
            self._unsaid.difference_update((r.worker, r.incarnation, r.sequence) for r in replies)
            out += self._addressed(replies)
        return out

    def _commit(self, index: int) -> None:
        for _ in range(len(self._log) - (self.index - index)):
            self._log.popleft()
        self.committed = index

    def _confirm(self) -> Outbox:
        """Confirm to the predecessor the entries that this copy and those behind it have."""
        predecessor = self._predecessor
        if predecessor is None or self.blank:
            return []
        return [(predecessor, Replicated(self.shard.number, self.epoch, self.committed))]

    def _installed(self, now_s: float, source: int, message: Install) -> Outbox:
        if message.epoch < self.epoch:
            return [(source, Fenced(self.shard.number, self.epoch))]
        if message.epoch > self.epoch or source != self._predecessor:
            return []
        if not self.blank and self.index >= message.index:
            return self._confirm()
        try:
            self.shard.load(message.state, message.tensors)
        except (
            ValueError
        ):  # another layout, in a view that was missed: a new copy, which knows it, takes this one's place
            self.finished = True
            return []
        self.index, self.blank = message.index, False
        self._meet_successor(())
        if self._successor is None:
            self.committed = self.index
        return self._confirm() + self._feed(now_s, self.timing.retry_s)

    # ------------------------------------------------------------------ views

    def _see(self, now_s: float, view: View) -> Outbox:
        if view.epoch < self.epoch:
            return []
        if view.finished:
            self.finished = True
        if view.epoch == self.epoch:
            return []
        missed = view.epoch > self.epoch + 1  # in between, another process may have taken a node that we know
        before, self.epoch = self.chain, view.epoch
        self.chain = view.chains[self.shard.number] if self.shard.number < len(view.chains) else ()
        if self.node not in self.chain:
            if self.node in before:  # deposed: its unconfirmed entries are void
                self.finished = True
                self._log.clear()
                self._held.clear()
            return []
        if self.blank:
            self._beat_at_s = now_s  # if it heads the chain without a state, the coordinator must know now
        if self.is_head and before and before[0] != self.node:
            self._silent_until = self.index
        self._meet_successor(() if missed else before)
        out = self._feed(now_s, self.timing.retry_s)
        return out + self._alone() if self._successor is None else out

    def _meet_successor(self, before: tuple[int, ...]) -> None:
        """A copy that stood behind this one before lacks only unconfirmed entries; a new one lacks the whole state."""
        successor = self._successor
        if successor is None or self.blank:
            self._install = None
        elif self.node in before and successor in before[before.index(self.node) + 1 :]:
            self._sent = self.index - len(self._log)
            if self._install is not None:
                self._install = replace(self._install, epoch=self.epoch)
        else:
            state, tensors = self.shard.dump()
            self._install = Install(self.shard.number, self.epoch, self.index, state, tensors)
            self._log.clear()

    def _alone(self) -> Outbox:
        """No copy is behind this one any more: all its entries are committed."""
        self._log.clear()
        self._install = None
        self.committed = self.index
        out: Outbox = []
        while self._held:
            out += self._addressed(self._held.popleft()[1])
        self._unsaid.clear()
        return out + self._confirm()
