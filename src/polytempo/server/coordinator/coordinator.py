"""`Coordinator`: who takes part, who holds which shard, and who trains on what. One for a run, in its launcher.

    Beat ◀── everybody        View ──▶ everybody      a node that is silent, or whose process has ended, is lost:
    Ask  ◀── worker           Deal ──▶ worker            worker: its tickets are dealt again, the shards are told
    Noted ◀─ shard         Members ──▶ shard             copy: the next one in the chain moves up, in a new epoch
    Scored ◀─ evaluator      Heard ──▶ evaluator      a score comes when it comes; only the end waits for the last one

If the launcher dies, the run ends; so the coordinator has no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.failure_detector import FailureDetector
from polytempo.server.coordinator.lost_shard import ShardLost
from polytempo.server.coordinator.membership import Membership
from polytempo.server.coordinator.resharding import Reshaper, Shards
from polytempo.server.coordinator.scores import Scores
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
from polytempo.server.record import Entry, Lost, Noting, Saving, Stopping, entry_of
from polytempo.server.requests import Requests
from polytempo.server.timing import Timing


class Coordinator:
    """The coordinator on node `node`, of `workers` (nodes) and `chains` (for each shard the nodes of its copies).

    `incarnation`: higher than that of the coordinator whose snapshot the shards go on from. `on_row(row)` takes rows of
    metrics (JSON) from workers and from the node `evaluator`. `on_event(event)` hears of ("lost", worker), ("joined",
    worker), ("promoted", shard), ("shortened", shard), ("deposed", node), ("copied", shard), ("saved", shard), and of
    ("silent", node) before a node is given up whose process must not go on. `on_entry(entry)` hears in their order of
    calls for work, losses, saves, an early end, and what shards noted: nothing else decides what is dealt and told.
    """

    def __init__(
        self,
        node: int,
        workers: Sequence[int],
        chains: Sequence[Sequence[int]],
        scheduler: BatchScheduler,
        timing: Timing | None = None,
        *,
        incarnation: int = 1,
        on_row: Callable[[bytes], None] | None = None,
        on_event: Callable[[tuple[str, int]], None] | None = None,
        on_entry: Callable[[Entry], None] | None = None,
        reshaper: Reshaper | None = None,
        evaluator: int | None = None,
    ) -> None:
        self.node, self.scheduler, self.evaluator = node, scheduler, evaluator
        self.reshaper = reshaper or Reshaper()
        self.timing = timing or Timing()
        self.epoch = 1
        self.chains = [tuple(chain) for chain in chains]
        self.statistics: dict[int, Statistics] = {}
        """What each shard said of itself at the end."""
        self.finished = False
        self._copies = max(len(chain) for chain in chains)
        self._expected = set(workers)
        """Workers that were started and have not been heard of."""
        self._returning: set[int] = set()
        """The same, of workers that were started again."""
        self._recruits: dict[int, int] = {}
        """Nodes that were started to hold a copy and have not been heard of -> shard."""
        self._blank: set[int] = set()
        """Copies that have not been handed their shard's state yet."""
        self.failures = FailureDetector(self.timing)
        self._asked = [Requests(COORDINATOR, incarnation, chain[0], self.timing) for chain in chains]
        self._who = Membership(len(chains), waits=scheduler.rests)
        self._told: dict[tuple[int, int], int] = {}
        """(shard, sequence) of a `Members` request -> the number of that change."""
        self._saving: set[tuple[int, int]] = set()
        """The same of `Save` requests that are not answered."""
        self._shards = Shards(self.chains, self._asked, self._who.known)
        self._calls = Calls()
        self._ending = False
        self._scores = Scores(evaluator, scheduler, self.timing.deadline_s)
        self._announced_s = 0.0
        self._on_row = on_row or (lambda row: None)
        self._on_event = on_event or (lambda event: None)
        self._on_entry = on_entry or (lambda entry: None)

    # ------------------------------------------------------------------ what the engine tells

    def recruit(self, shard: int, node: int) -> None:
        """A process was started on `node` to hold a copy of `shard`; it joins the chain when it is heard of."""
        self._recruits[node] = shard

    def expect(self, worker: int) -> None:
        """A process was started as the next life of `worker`; nobody waits for it, but it must come in time."""
        self._returning.add(worker)

    @property
    def members(self) -> dict[int, int]:
        """The workers that take part, with their incarnations."""
        return self._who.members

    @property
    def view(self) -> View:
        """Who is who at this moment."""
        members, reshaper = tuple(sorted(self.members.items())), self.reshaper
        return View(self.epoch, tuple(self.chains), members, self.finished, reshaper.layout, reshaper.spans)

    @property
    def released(self) -> set[int]:
        """The workers that were told to finish and have said that they go."""
        return set(self._calls.finishing) - set(self.members)

    @property
    def wanted(self) -> list[int]:
        """The shards that lack a copy for which nobody was started yet."""
        if self._ending or self.reshaper.moving:
            return []
        on_the_way = list(self._recruits.values())
        return [s for s, chain in enumerate(self.chains) if chain and len(chain) + on_the_way.count(s) < self._copies]

    def lose(self, now_s: float, node: int) -> Outbox:
        """`node` is gone for good: its process has ended, or it has been silent for too long. Raises `ShardLost`."""
        self._on_entry(Lost(node))
        self.failures.forget(node)
        self._recruits.pop(node, None)
        self._returning.discard(node)
        out: Outbox = []
        if node in self._expected:
            self._expected.remove(node)
            self.scheduler.lose(node)
            out += self._deals(now_s)
        if node in self.members:
            self._on_event(("lost", node))
            del self.members[node]
            self._calls.lose(node)
            out += self._tell_members(now_s)  # while elements move, they are told afterwards
            self._who.leaving[node] = self._who.changes + self.reshaper.moving
        if (never_begun := self.reshaper.lose(node)) is not None:
            raise ShardLost(never_begun, self._copies - 1)
        for shard, chain in enumerate(self.chains):
            if node in chain:
                self._on_event(("promoted" if chain[0] == node else "shortened", shard))
                self._on_event(("deposed", node))
                self.chains[shard] = tuple(other for other in chain if other != node)
                if not self.chains[shard]:
                    raise ShardLost(shard, self._copies - 1)
                out += self._new_epoch(now_s)
        return out

    def save(self, now_s: float, number: int) -> Outbox:
        """Ask every shard for snapshot `number`; not while elements move from one to another."""
        if self.reshaper.moving:
            return []
        self._on_entry(Saving(0, 0, number))
        at = self.scheduler.save()
        self._saving |= self._shards.ask(lambda worker, life, sequence: Save(worker, life, sequence, number, at))
        return self._shards.sendable(now_s)

    def add_shard(self, now_s: float, nodes: Sequence[int]) -> Outbox:
        """One shard more, whose copies were started on `nodes`. Training stands still while elements move."""
        self.reshaper.add(nodes)
        self.scheduler.pause()
        return self._deals(now_s) + self._reshape(now_s)

    def drain_shard(self, now_s: float, shard: int) -> Outbox:
        """Shard `shard` gives what it holds to the others, and its copies end; numbers stay."""
        self.reshaper.drain(shard)
        self.scheduler.pause()
        return self._deals(now_s) + self._reshape(now_s)

    # ------------------------------------------------------------------ the machine

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message; what is to be sent because of it."""
        self.failures.heard(now_s, source)
        self.reshaper.heard(source)
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
                    self._on_row(message.row)
                out = [(source, Heard(self._scores.highest)), *self._deals(now_s), *self._end(now_s)]
        return out + self._reshape(now_s)

    def tick(self, now_s: float) -> Outbox:
        """What time asks for: to notice who is silent, and to send again what was not answered."""
        out: Outbox = []
        while silent := self._silent(now_s):  # one at a time: the last copy of a shard is not given up
            self._on_event(("silent", silent[0]))
            out += self.lose(now_s, silent[0])
        out += self._shards.late(now_s)
        if now_s - self._announced_s >= self.timing.beat_s:
            out += self._announce(now_s)
        return out + self._shards.sendable(now_s) + self._deals(now_s) + self._end(now_s) + self._reshape(now_s)

    def wait_s(self, now_s: float) -> float:
        """How long nothing is to be done unless something arrives."""
        beat_s = self._announced_s + self.timing.beat_s - now_s
        return max(0.0, min([beat_s, *(asked.wait_s(now_s) for asked in self._asked)]))

    def flops(self, message: Message) -> float:
        """The coordinator's work is free."""
        return 0.0

    # ------------------------------------------------------------------ membership

    def _beat(self, now_s: float, source: int, beat: Beat) -> Outbox:
        if source in self._recruits:
            shard = self._recruits.pop(source)
            self.chains[shard] = (*self.chains[shard], source)
            self._blank.add(source)
            self._on_event(("copied", shard))
            return self._new_epoch(now_s)
        self._blank -= {source} if beat.incarnation else set()
        headed = None if beat.incarnation or beat.epoch != self.epoch else self._shards.headed_by(source)
        if headed is not None:  # a copy without a state: the last whole one died before it had handed it on
            raise ShardLost(headed, self._copies - 1)
        return [(source, self.view)] if beat.epoch < self.epoch or self.finished else []

    def _silent(self, now_s: float) -> list[int]:
        """Who is given up. Not the last copy with a state: it may be busy, and nobody could take its place."""
        copies = {node for chain in self.chains for node in chain if set(chain) - self._blank - {node}}
        starting = self._expected | self._returning | set(self._recruits) | self.reshaper.absent
        return self.failures.look(now_s, copies, self.members, starting)

    def _tell_members(self, now_s: float) -> Outbox:
        """Tell the shards who takes part, if that has changed. Who rests is to them as one who has left."""
        if self._ending or self._expected or self.reshaper.moving:
            return []
        facts = self._who.change(self.scheduler.resting, self._in_hand)
        self.scheduler.hold_back(self._who.closing)
        if facts is None:
            return []
        members, resting = facts
        asked = self._shards.ask(lambda worker, life, sequence: Members(worker, life, sequence, members, resting))
        self._told.update(dict.fromkeys(asked, self._who.changes))
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
        """The view, to everybody: now and then even without news, for a message may be lost."""
        self._announced_s = now_s
        nodes = {*(node for chain in self.chains for node in chain), *self.members}
        nodes |= set() if self.evaluator is None else {self.evaluator}
        return [(node, self.view) for node in sorted(nodes)]

    # ------------------------------------------------------------------ work

    def _work(self, now_s: float, ask: Ask) -> Outbox:
        out: Outbox = []
        present = self.members.get(ask.worker)
        if present is None and (self._ending or ask.worker in self._calls.finishing):
            return self._end(now_s) or ([(ask.worker, self.view)] if self.finished else [])  # too late to take part
        if ask.worker in self._who.leaving:
            return []  # its former life is not over everywhere; it will call again
        if present is None and self._calls.is_of_the_past(ask):
            return [(ask.worker, Deal(ask.worker, ask.incarnation, ask.sequence, "finish"))]  # it was thought dead
        if present is None or present < ask.incarnation:
            if present is not None:  # it died and is back before anybody noticed
                return self.lose(now_s, ask.worker)
            self._expected.discard(ask.worker)
            self._returning.discard(ask.worker)
            self._on_event(("joined", ask.worker))
            self.members[ask.worker] = ask.incarnation
            self._calls.begin(ask)
            self.scheduler.join(ask.worker, ask.incarnation)
            out += self._tell_members(now_s)
        elif present > ask.incarnation:
            return []
        self._on_entry(entry_of(ask))
        for row in self._calls.new_rows(ask):
            self._on_row(row)
        if self._calls.is_goodbye(ask):
            self.members.pop(ask.worker, None)
            self._calls.lose(ask.worker)
            self.scheduler.leave(ask.worker, ask.done)
            return self._tell_members(now_s) + self._end(now_s)
        self._calls.waiting[ask.worker] = ask
        return out + self._deals(now_s) + self._end(now_s)

    def _deals(self, now_s: float) -> Outbox:
        """Answer the calls for work that can be answered: those of workers that every shard knows as members."""
        if self._expected or self.reshaper.moving:
            return []  # the first deal is made when all that were started are here
        out: Outbox = []
        calls = self._calls
        for worker, ask in calls.waiting.items():  # what cannot be answered yet, the scheduler remembers
            deal = self.scheduler.ask(ask.worker, ask.incarnation, ask.sequence, ask.done)
            if deal is not None and calls.was_answered(ask):
                out.append((worker, replace(deal, layout=self.reshaper.layout)))  # once more
            elif deal is not None:
                calls.unsaid[worker] = deal
        calls.waiting.clear()
        calls.unsaid.update((deal.worker, deal) for deal in self.scheduler.due())
        out += self._tell_members(now_s)
        for worker, deal in list(calls.unsaid.items()):
            if deal.order == "finish":
                calls.finishing[worker] = deal.sequence
            elif not self._who.knows(worker) or (self._who.closing and deal.order == "train"):
                continue
            out.append((worker, replace(calls.say(worker), layout=self.reshaper.layout)))
        return out

    def _end(self, now_s: float) -> Outbox:
        """After the last ticket: ask the shards how it was; when they have said so and all workers have gone, end."""
        if not self.scheduler.finished or self._expected or self.reshaper.moving:
            return []  # and those that were started hear of it, however soon it comes
        if not self._ending:
            self._ending = True
            self._shards.ask(Inquire)
        busy = self.members or len(self.statistics) < len(self.chains)
        if self.finished or busy or self._scores.lacks_last(now_s):
            return self._shards.sendable(now_s)
        self.finished = True
        return self._announce(now_s)

    def stop(self) -> None:
        """The run ends now: a score is what was asked for."""
        self._on_entry(Stopping())
        self.scheduler.stop()

    def _noted(self, now_s: float, reply: Reply) -> Outbox:
        if not self._asked[reply.shard].answered(reply, now_s):
            return []
        change = self._told.pop((reply.shard, reply.sequence), None)
        if change is not None:
            for worker in self._who.note(reply.shard, change):
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
            self._on_entry(Noting(reply.shard, reply.sequence))
            if change is None and not reply.what:
                self._on_event(("saved", reply.shard))
        return self._shards.sendable(now_s) + self._deals(now_s) + self._end(now_s)

    # ----------------------------------------- shards that come and go: see `server.coordinator.resharding`

    def _reshape(self, now_s: float) -> Outbox:
        """Go on with what is wanted, as far as that is possible now."""
        reshaper, layout = self.reshaper, self.reshaper.layout
        if not reshaper.busy:
            return []
        told = reshaper.go_on(self._is_still, self._shards)
        out = self._shards.sendable(now_s)
        if told is not None:
            out += self._new_epoch(now_s)
            out += [(node, self.view) for node in told]  # should it be lost, they ask for it with their next beat
        if layout == reshaper.layout:
            return out if told is None else out + self._reshape(now_s)
        if not reshaper.busy:
            self.scheduler.resume()
        self._on_event(("reshaped", reshaper.layout))
        return out + self._reshape(now_s) + self._deals(now_s)

    @property
    def _is_still(self) -> bool:
        """Whether nobody has anything under way: no worker, and not the coordinator itself."""
        calls = self._calls.waiting or self._calls.unsaid
        busy = self._expected or self._recruits or self._who.leaving or calls or self._ending
        return self.scheduler.quiet and not busy and not self._shards.busy and self._who.is_settled
