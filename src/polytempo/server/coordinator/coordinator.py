"""`Coordinator`: decides the members, the nodes of each shard, and the batches of each worker.

    Beat ◀── every node       View ──▶ every node     a node that is silent or has ended is lost:
    Ask  ◀── worker           Deal ──▶ worker            worker: its tickets are dealt again, the shards get `Members`
    Noted ◀─ shard         Members ──▶ shard             copy: the next one in the chain moves up, in a new epoch
    Scored ◀─ evaluator      Heard ──▶ evaluator      only the end of the run waits for a score, the last one

A run has one coordinator, in its launcher. If the launcher dies, the run ends; so the coordinator has no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.chains import Chains
from polytempo.server.coordinator.evaluator import Scores
from polytempo.server.coordinator.failure_detector import FailureDetector
from polytempo.server.coordinator.membership import Membership
from polytempo.server.coordinator.resharding import Reshaper, Shards
from polytempo.server.coordinator.work_calls import Calls
from polytempo.server.message import (
    COORDINATOR,
    Ask,
    Beat,
    Deal,
    Heard,
    Inquire,
    Lent,
    Members,
    Message,
    Noted,
    Outbox,
    Reply,
    Save,
    Scored,
    Statistics,
    View,
)
from polytempo.server.record import Asking, Entry, Lost, Noting, Saving, Stopping
from polytempo.server.requests import Requests
from polytempo.server.timing import Timing


class Listeners(NamedTuple):
    """The functions that a coordinator calls when something happens."""

    on_row: Callable[[bytes], None] = lambda row: None
    """Takes each row of metrics (JSON) that a worker or the evaluator sends."""
    on_event: Callable[[tuple[str, int]], None] = lambda event: None
    """Takes ("lost", worker), ("joined", worker), ("promoted", shard), ("shortened", shard), ("deposed", node),
    ("copied", shard), ("saved", shard), ("reshaped", layout), and ("silent", node) before a node is given up: its
    process must not go on."""
    on_entry: Callable[[Entry], None] = lambda entry: None
    """Takes, in their order, calls for work, losses, saves, an early end, and the shards' notes: the coordinator's
    deals and messages depend on these alone."""


class Nodes(NamedTuple):
    """The nodes of a run, by role."""

    coordinator: int
    workers: Sequence[int]
    chains: Sequence[Sequence[int]]
    """The nodes of each shard's copies, the head first."""
    evaluator: int | None = None


class Coordinator:
    """The coordinator of `nodes`. `incarnation`: higher than the incarnation of the coordinator in the resumed
    snapshot."""

    def __init__(
        self,
        nodes: Nodes,
        scheduler: BatchScheduler,
        timing: Timing | None = None,
        *,
        incarnation: int = 1,
        listeners: Listeners | None = None,
        reshaper: Reshaper | None = None,
    ) -> None:
        self.nodes, self.scheduler = nodes, scheduler
        self.reshaper = reshaper or Reshaper()
        self.timing = timing or Timing()
        self.epoch = 1
        self.statistics: dict[int, Statistics] = {}
        """Each shard's statistics at the end of the run."""
        self.finished = False
        self.began_s = 0.0
        """The time of the first deal; until then, 0."""
        self._chains = Chains(nodes.chains)
        self._expected = set(nodes.workers)
        """Workers that were started and have not sent a message."""
        self._returning: set[int] = set()
        """The same, of workers that were started again."""
        self.failure_detector = FailureDetector(self.timing)
        self._membership = Membership(len(nodes.chains), waits=scheduler.rests)
        self._asked = [Requests(COORDINATOR, incarnation, chain[0], self.timing) for chain in nodes.chains]
        self._shards = Shards(self.chains, self._asked, self._membership.known)
        self._announcing: dict[tuple[int, int], int] = {}
        """(shard, sequence) of a `Members` request without an answer -> the number of that change."""
        self._saving: set[tuple[int, int]] = set()
        """The same of `Save` requests."""
        self._calls = Calls()
        self._ending = False
        self._scores = Scores(nodes.evaluator, scheduler, self.timing.deadline_s)
        self._announced_s = 0.0
        self._listeners = listeners or Listeners()

    # ------------------------------------------------------------------ calls of the engine

    def recruit(self, shard: int, node: int) -> None:
        """A process was started on `node` to hold a copy of `shard`; it joins the chain with its first message."""
        self._chains.start(shard, node)

    def expect(self, worker: int) -> None:
        """A process was started as the next life of `worker`. The run does not wait for it; it must come in time."""
        self._returning.add(worker)

    @property
    def chains(self) -> list[tuple[int, ...]]:
        """The nodes of each shard's copies, the head first; () for a drained shard."""
        return self._chains.nodes

    @property
    def members(self) -> dict[int, int]:
        """The workers that take part, with their incarnations."""
        return self._membership.members

    @property
    def view(self) -> View:
        """Chains, members and ranges of shards at this moment."""
        members, reshaper = tuple(sorted(self.members.items())), self.reshaper
        return View(self.epoch, tuple(self.chains), members, self.finished, reshaper.layout, reshaper.spans)

    @property
    def released(self) -> set[int]:
        """The workers that have confirmed their order to finish."""
        return set(self._calls.finishing) - set(self.members)

    @property
    def wanted(self) -> list[int]:
        """The shards that lack a copy, except for copies being started."""
        return [] if self._ending or self.reshaper.moving else self._chains.lacking

    def lose(self, now_s: float, node: int) -> Outbox:
        """`node` is gone for good: its process has ended, or it has been silent for too long. Raises `ShardLost`."""
        self._listeners.on_entry(Lost(node))
        self.failure_detector.forget(node)
        self._chains.cancel(node)
        self._returning.discard(node)
        out: Outbox = []
        if node in self._expected:
            self._expected.remove(node)
            self.scheduler.lose(node)
            out += self._deals(now_s)
        if node in self.members:
            self._listeners.on_event(("lost", node))
            self._membership.leave(node)
            self._calls.lose(node)
            out += self._notify_shards(now_s)  # while elements move, this comes afterwards
            self._membership.leaving[node] = self._membership.changes + self.reshaper.moving
        if (never_begun := self.reshaper.lose(node)) is not None:
            raise self._chains.lost(never_begun)
        if (shard := self._chains.shard_of(node)) is not None:
            self._listeners.on_event(("promoted" if self.chains[shard][0] == node else "shortened", shard))
            self._listeners.on_event(("deposed", node))
            self._chains.remove(node)
            out += self._new_epoch(now_s)
        return out

    def save(self, now_s: float, number: int) -> Outbox:
        """Ask every shard for snapshot `number`; not while elements move from one to another."""
        if self.reshaper.moving:
            return []
        self._listeners.on_entry(Saving(0, 0, number))
        at = self.scheduler.save()
        self._saving |= self._shards.ask(lambda worker, life, sequence: Save(worker, life, sequence, number, at))
        return self._shards.sendable(now_s)

    def add_shard(self, now_s: float, nodes: Sequence[int]) -> Outbox:
        """Add a shard with copies started on `nodes`. Workers are idle while elements move."""
        self.reshaper.add(nodes)
        self.scheduler.pause()
        return self._deals(now_s) + self._reshape(now_s)

    def drain_shard(self, now_s: float, shard: int) -> Outbox:
        """Shard `shard` gives its elements to the others, and its copies end; the others keep their numbers."""
        self.reshaper.drain(shard)
        self.scheduler.pause()
        return self._deals(now_s) + self._reshape(now_s)

    # ------------------------------------------------------------------ the machine

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message and return the messages to send."""
        self.failure_detector.note_alive(now_s, source)
        self.reshaper.note_alive(source)
        out: Outbox = []
        match message:
            case Beat():
                out = self._beat(now_s, source, message)
            case Ask():
                out = self._work(now_s, message)
            case Reply():
                out = self._noted(now_s, message)
            case Scored():
                if self._scores.take(message):
                    self._listeners.on_row(message.row)
                out = [(source, Heard(self._scores.highest)), *self._deals(now_s), *self._end(now_s)]
        return out + self._reshape(now_s) if self.reshaper.busy else out

    def tick(self, now_s: float) -> Outbox:
        """Give up silent nodes, and send unanswered messages again."""
        out: Outbox = []
        while silent := self._silent(now_s):  # one at a time: the last copy of a shard is not given up
            self._listeners.on_event(("silent", silent[0]))
            out += self.lose(now_s, silent[0])
        out += self._shards.late(now_s)
        if now_s - self._announced_s >= self.timing.beat_s:
            out += self._announce(now_s)
        return out + self._shards.sendable(now_s) + self._deals(now_s) + self._end(now_s) + self._reshape(now_s)

    def wait_s(self, now_s: float) -> float:
        """The time until the next `tick`, unless a message arrives."""
        beat_s = self._announced_s + self.timing.beat_s - now_s
        return max(0.0, min([beat_s, *(asked.wait_s(now_s) for asked in self._asked)]))

    def flops(self, message: Message) -> float:
        """The coordinator's work is free."""
        return 0.0

    # ------------------------------------------------------------------ membership

    def _beat(self, now_s: float, source: int, beat: Beat) -> Outbox:
        if (joined := self._chains.join(source)) is not None:
            self._listeners.on_event(("copied", joined))
            return self._new_epoch(now_s)
        if beat.incarnation:
            self._chains.take_state(source)
        headed = None if beat.incarnation or beat.epoch != self.epoch else self._shards.headed_by(source)
        if headed is not None:  # a copy without a state: the last one with it died before the transfer
            raise self._chains.lost(headed)
        return [(source, self.view)] if beat.epoch < self.epoch or self.finished else []

    def _silent(self, now_s: float) -> list[int]:
        """The nodes to give up. Not the last copy with a state: it may be busy, and no node could take its place."""
        starting = self._expected | self._returning | self._chains.starting | self.reshaper.absent
        return self.failure_detector.silent_nodes(now_s, self._chains.replaceable, self.members, starting)

    def _notify_shards(self, now_s: float) -> Outbox:
        """Send the shards the members, if these have changed. They see a resting worker as one that has left."""
        if self._ending or self._expected or self.reshaper.moving:
            return []
        facts = self._membership.change(self.scheduler.resting, self._in_hand)
        self.scheduler.hold_back(self._membership.closing)
        if facts is None:
            return []
        members, resting = facts
        asked = self._shards.ask(lambda worker, life, sequence: Members(worker, life, sequence, members, resting))
        self._announcing.update(dict.fromkeys(asked, self._membership.changes))
        return self._shards.sendable(now_s)

    def _in_hand(self) -> set[int]:
        """The workers that know of a ticket of theirs that is not done."""
        unsaid = self._calls.unknown_tickets
        holders = self.scheduler.holders().items()
        return {worker for ticket, worker in holders if ticket not in unsaid and worker in self.members}

    def _new_epoch(self, now_s: float) -> Outbox:
        self.epoch += 1
        return self._announce(now_s) + self._shards.redirected(now_s)

    def _announce(self, now_s: float) -> Outbox:
        """The view, to every node: now and then even without news, for a message may be lost."""
        self._announced_s = now_s
        nodes = {*(node for chain in self.chains for node in chain), *self.members}
        nodes |= set() if self.nodes.evaluator is None else {self.nodes.evaluator}
        view = self.view
        return [(node, view) for node in sorted(nodes)]

    # ------------------------------------------------------------------ work

    def _work(self, now_s: float, ask: Ask) -> Outbox:
        out: Outbox = []
        present = self.members.get(ask.worker)
        if present is None and (self._ending or ask.worker in self._calls.finishing):
            return self._end(now_s) or ([(ask.worker, self.view)] if self.finished else [])  # too late to take part
        if ask.worker in self._membership.leaving:
            return []  # some shard still counts its former life; it will call again
        if present is None and self._calls.is_of_the_past(ask):
            return [(ask.worker, Deal(ask.worker, ask.incarnation, ask.sequence, "finish"))]  # its life was given up
        if present is None or present < ask.incarnation:
            if present is not None:  # it died and is back before the failure detector noticed
                return self.lose(now_s, ask.worker)
            self._expected.discard(ask.worker)
            self._returning.discard(ask.worker)
            self._listeners.on_event(("joined", ask.worker))
            self._membership.join(ask.worker, ask.incarnation)
            self._calls.begin(ask)
            self.scheduler.join(ask.worker, ask.incarnation)
            out += self._notify_shards(now_s)
        elif present > ask.incarnation:
            return []
        self._listeners.on_entry(Asking(ask.worker, ask.incarnation, ask.sequence, ask.done))
        for row in self._calls.new_rows(ask):
            self._listeners.on_row(row)
        if self._calls.is_goodbye(ask):
            self._membership.leave(ask.worker)
            self._calls.lose(ask.worker)
            self.scheduler.leave(ask.worker, ask.done)
            return self._notify_shards(now_s) + self._end(now_s)
        self._calls.waiting[ask.worker] = ask
        return out + self._deals(now_s) + self._end(now_s)

    def _deals(self, now_s: float) -> Outbox:
        """Answer the calls of workers that every shard knows as members."""
        if self._expected or self.reshaper.moving:
            return []  # the first deal is made when all workers that were started are here
        self.began_s = self.began_s or now_s
        out: Outbox = []
        calls = self._calls
        for worker, ask in calls.waiting.items():  # the batch scheduler keeps calls that it cannot answer yet
            deal = self.scheduler.ask(ask.worker, ask.incarnation, ask.sequence, ask.done)
            if deal is not None and calls.was_answered(ask):
                out.append((worker, replace(deal, layout=self.reshaper.layout)))  # once more
            elif deal is not None:
                calls.unsaid[worker] = deal
        calls.waiting.clear()
        for deal in self.scheduler.due():
            calls.unsaid[deal.worker] = deal
        out += self._notify_shards(now_s)
        # a step dealt before every shard knows who makes it could lack a worker on one of them
        held = self._membership.closing or (self.scheduler.deals == "evenly" and not self._membership.is_settled)
        for worker, deal in list(calls.unsaid.items()):
            if deal.order in ("finish", "stop"):
                calls.finishing[worker] = deal.sequence
            elif deal.order == "pause":
                pass  # no shard need know a worker that gets no ticket
            elif not self._membership.knows(worker) or (held and deal.order == "train"):
                continue
            deal, layout = calls.say(worker), self.reshaper.layout
            out.append((worker, deal if deal.layout == layout else replace(deal, layout=layout)))
        return out

    def _end(self, now_s: float) -> Outbox:
        """Ask the shards for their statistics: the last ticket is done. Once these are here and all workers gone,
        end."""
        if not self.scheduler.finished or self._expected or self.reshaper.moving:
            return []  # a worker that was started learns of the end, too
        if not self._ending:
            self._ending = True
            self._shards.ask(Inquire)
        busy = self.members or len(self.statistics) < len(self.chains)
        if self.finished or busy or self._scores.lacks_last(now_s):
            return self._shards.sendable(now_s)
        self.finished = True
        return self._announce(now_s)

    def stop(self) -> None:
        """End the run now: a score has reached its target."""
        self._listeners.on_entry(Stopping())
        self.scheduler.stop()

    def _noted(self, now_s: float, reply: Reply) -> Outbox:
        if not self._asked[reply.shard].answered(reply, now_s):
            return []
        change = self._announcing.pop((reply.shard, reply.sequence), None)
        if change is not None:
            for worker in self._membership.note(reply.shard, change):
                self.scheduler.lose(worker)
        if (reply.shard, reply.sequence) in self._saving:
            self._saving.remove((reply.shard, reply.sequence))
            if not self._saving:
                self.scheduler.saved()
        if isinstance(reply, Statistics):
            self.statistics[reply.shard] = reply
        if isinstance(reply, Lent):
            self.reshaper.take(reply)
        if isinstance(reply, Noted):
            self._listeners.on_entry(Noting(reply.shard, reply.sequence))
            if change is None and not reply.what:
                self._listeners.on_event(("saved", reply.shard))
        return self._shards.sendable(now_s) + self._deals(now_s) + self._end(now_s)

    # ----------------------------------------- shards that come and go: see `server.coordinator.resharding`

    def _reshape(self, now_s: float) -> Outbox:
        """Go on with the changes that are wanted, as far as that is possible now."""
        reshaper, layout = self.reshaper, self.reshaper.layout
        if not reshaper.busy:
            return []
        released = reshaper.go_on(self._is_still, self._shards)
        out = self._shards.sendable(now_s)
        if released is not None:
            out += self._new_epoch(now_s)
            out += [(node, self.view) for node in released]  # if it is lost, they ask for it with their next beat
        if layout == reshaper.layout:
            return out if released is None else out + self._reshape(now_s)
        if not reshaper.busy:
            self.scheduler.resume()
        self._listeners.on_event(("reshaped", reshaper.layout))
        return out + self._reshape(now_s) + self._deals(now_s)

    @property
    def _is_still(self) -> bool:
        """True if no request is under way, of a worker or of the coordinator."""
        calls = self._calls.waiting or self._calls.unsaid
        busy = self._expected or self._chains.starting or self._membership.leaving or calls or self._ending
        return self.scheduler.quiet and not busy and not self._shards.busy and self._membership.is_settled
