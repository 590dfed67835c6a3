"""The server's promises, checked after every event. A broken promise is a `Violation` that names it and the node.

The oracle trusts no table: ticket t adds 1 to weight t, so the weights themselves say how often t was applied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.chaos.copies import Copies, node_of
from polytempo.chaos.worker import ChaosWorker
from polytempo.chaos.world import Violation, World
from polytempo.core.errors import PolytempoError
from polytempo.server.message import COORDINATOR, Ask, Deal, Message, Pulled, Push, Pushed, PushPart, Reply
from polytempo.server.worker.client import Client, Refused

_HAD = "had already"
"""The reason of a shard that drops a known push; any other reason is the rule's."""


class Promises(NamedTuple):
    """The promises of the scenario's rule in addition to every rule's promises."""

    bound: int | None = None
    """SSP's bound."""
    reads_own: bool = True
    """True if an acknowledged push is in the weights, and not only in a sum."""
    may_drop: bool = False
    """True if the rule may leave out a push."""
    fresh: bool = False
    """True if no gradient of older weights may be used."""


class Checkers:
    """Watches a world of `num_tickets` tickets."""

    def __init__(self, world: World, copies: Copies, num_tickets: int, promises: Promises) -> None:
        """`copies` knows the nodes of each shard."""
        self._world, self._copies, self._promises = world, copies, promises
        self._num_tickets = num_tickets
        self._pushes: dict[tuple[int, int, int, int], Push | PushPart] = {}
        self._tickets_by_clock: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._acknowledged: list[set[int]] = [set() for _ in copies.nodes]
        self._late: list[set[int]] = [set() for _ in copies.nodes]
        self._heads: dict[tuple[int, int], int] = {}
        self._lent: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self.last_score = 0
        """The number of batches of the last score."""
        self._owners: dict[int, tuple[int, int, int]] = {}
        self.worker_lost = False

    # ------------------------------------------------------------------ messages

    def sent(self, now_s: float, source: int, target: int, message: Message) -> None:
        """Note every request, and check every answer."""
        match message:
            case Push() if source == message.worker:
                requests: tuple[Push | PushPart, ...] = (message, *message.parts)
                for request in requests:
                    self._asked(self._copies.shard_of(target), request)
            case Pushed():
                self._answers(source, message)
                self._acknowledges(source, message)
            case Pulled():
                self._answers(source, message)
                self._lent[_key(message)] = message.values, message.values.clone()
            case Reply() if message.worker != COORDINATOR:
                self._answers(source, message)
            case Deal():
                self._dealt(message)
            case Ask():
                self._claims(message)

    def arriving(self, now_s: float, node: int, source: int, message: Message) -> None:
        """Check that weights lent to a worker did not change on their way."""
        if not isinstance(message, Pulled):
            return
        worker = self._world.machine(node)
        if isinstance(worker, ChaosWorker) and self._counts(worker.client) and _waits(worker, message):
            now, then = self._lent[_key(message)]
            if not torch.equal(now, then):
                raise Violation(f"the weights that node {source} lent to worker {node} changed on their way")

    def _dealt(self, deal: Deal) -> None:
        """Check that a ticket for a second worker is marked `again`."""
        for ticket in deal.tickets:
            owner = self._owners.setdefault(ticket.number, (deal.worker, deal.incarnation, deal.sequence))
            if owner != (deal.worker, deal.incarnation, deal.sequence) and not ticket.again:
                raise Violation(f"ticket {ticket.number} was dealt twice, to {owner} and to worker {deal.worker}")

    def _claims(self, ask: Ask) -> None:
        """Check that every shard has acknowledged the tickets that a worker reports as done."""
        for ticket in ask.done:
            for shard, acknowledged in enumerate(self._acknowledged):
                if ticket not in acknowledged and ticket not in self._late[shard]:
                    raise Violation(f"worker {ask.worker} says that ticket {ticket} is done, shard {shard} has not")

    def _asked(self, shard: int, push: Push | PushPart) -> None:
        key = shard, push.worker, push.incarnation, push.sequence
        known = self._pushes.setdefault(key, push)
        if known.tickets != push.tickets or known.clock != push.clock:
            raise Violation(f"worker {push.worker} gave number {push.sequence} to two pushes")
        self._tickets_by_clock[push.worker, push.incarnation, push.clock] = push.tickets

    def _answers(self, source: int, reply: Reply) -> None:
        """Check that only one copy answers in an epoch."""
        node = node_of(self._world.machine(source))
        if node is None:
            return
        head = self._heads.setdefault((reply.shard, node.epoch), source)
        if head != source:
            raise Violation(f"nodes {head} and {source} both answer for shard {reply.shard} in epoch {node.epoch}")

    def _acknowledges(self, source: int, reply: Pushed) -> None:
        """Check that an acknowledged push is in the state of the copy that answers, and note it: it must never be
        missing."""
        push = self._pushes.get(_key(reply))
        if push is None:
            raise Violation(f"node {source} answers a request that no worker made: {reply}")
        if reply.verdict == "refused":
            raise Violation(f"node {source} refused a good push of worker {reply.worker}: {reply.reason}")
        if reply.verdict == "dropped" and reply.reason != _HAD:
            if not self._promises.may_drop:
                raise Violation(f"node {source} dropped a push of worker {reply.worker}: {reply.reason}")
            self._late[reply.shard].update(push.tickets)
            return
        if self._promises.fresh and reply.verdict == "applied" and reply.staleness:
            raise Violation(f"worker {reply.worker}'s gradient was used {reply.staleness} updates late")
        self._acknowledged[reply.shard].update(push.tickets)
        self._in_state(source, "acknowledged")

    # ------------------------------------------------------------------ states

    def handled(self, now_s: float, node: int) -> None:
        """Check the state of a copy that has moved: it must be right, and equal the other copies' states."""
        machine = node_of(self._world.machine(node))
        if machine is None or machine.blank:
            return
        seen, present = self._seen.get(node), (machine.epoch, machine.index)
        if seen == present:
            return
        self._seen[node] = present
        counts = self._copies.counts(machine)
        if counts.max() > 1:
            twice = [t for t, count in enumerate(counts.tolist()) if count > 1]
            raise Violation(f"shard {machine.shard.number} on node {node} has applied twice: tickets {twice}")
        if machine.is_head and (seen is None or seen[0] != machine.epoch):
            self._in_state(node, "acknowledged, and lost when a view changed")
        self._copies.agree(machine)
        self._copies.bounded(machine)

    def _in_state(self, node: int, what: str) -> None:
        machine = node_of(self._world.machine(node))
        if machine is None or not self._copies.is_current(machine):
            return
        shard = machine.shard.number
        counts = self._copies.counts(machine).tolist()
        missing = sorted(t for t in self._acknowledged[shard] if counts[t] != 1)
        if missing:
            raise Violation(f"tickets {missing} are not in shard {shard} on node {node}: {what}")

    def gave_up(self, node: int, error: PolytempoError) -> None:
        """Only a worker that was thought dead may give up, because the shards refuse it."""
        machine = self._world.machine(node)
        if isinstance(machine, ChaosWorker) and isinstance(error, Refused) and not self._counts(machine.client):
            return
        raise Violation(f"node {node} gave up: {error}") from error

    # ------------------------------------------------------------------ readers

    def read(self, client: Client, clock: int, weights: Tensor) -> None:
        """Check weights that a worker reads: whole, with all its own pushes, and as new as the rule promises."""
        if not self._counts(client):
            return
        if bool(((weights != 0) & (weights != 1)).any()):
            raise Violation(f"worker {client.worker} read weights that no sequence of pushes makes: {weights.tolist()}")
        shards = weights.view(-1, self._num_tickets)
        if self._promises.reads_own:
            self._reads_own(client, shards)
        if self._promises.bound is not None and not self.worker_lost:
            self._reads_new(client.worker, clock, shards.amin(0).tolist())

    def _counts(self, client: Client) -> bool:
        """True for a member. A worker that was thought dead may read anything: it cannot push it."""
        return self._copies.coordinator.members.get(client.worker) == client.incarnation

    def _reads_own(self, client: Client, shards: Tensor) -> None:
        for (worker, incarnation, _), tickets in self._tickets_by_clock.items():
            if (worker, incarnation) != (client.worker, client.incarnation):
                continue
            for ticket in tickets:
                for shard, late in enumerate(self._late):
                    if ticket in self._acknowledged[shard] and ticket not in late and not shards[shard, ticket]:
                        raise Violation(f"worker {worker} does not read its own ticket {ticket} in shard {shard}")

    def _reads_new(self, reader: int, clock: int, visible: list[float]) -> None:
        """SSP: a worker that reads at clock c sees every step up to c - bound of every worker."""
        assert self._promises.bound is not None
        needed = clock - self._promises.bound
        for worker in self._copies.workers:
            clocks = [
                c for (w, _, c), ts in self._tickets_by_clock.items() if w == worker and all(visible[t] for t in ts)
            ]
            if worker != reader and max(clocks, default=0) < needed:
                raise Violation(
                    f"worker {reader} read at clock {clock}, and saw worker {worker} only up to "
                    f"{max(clocks, default=0)}; the bound is {self._promises.bound}"
                )

    def scored(self, number: int, weights: Tensor, most_together: int) -> None:
        """A score is of weights that have been, and of as many batches as it says, but for some that were
        decided with the last of them: in one push, or in one step of all workers, `most_together`."""
        if number <= self.last_score:
            raise Violation(f"the score of {number} batches comes after the score of {self.last_score}")
        self.last_score = number
        if bool(((weights != 0) & (weights != 1)).any()):
            raise Violation(f"weights were scored that no sequence of pushes makes: {weights.tolist()}")
        for shard, counts in enumerate(weights.view(-1, self._num_tickets).sum(dim=1).tolist()):
            least = number - len(self._late[shard]) if self._promises.reads_own else 0
            if not least <= counts < number + most_together:
                raise Violation(f"the score of {number} batches is of {counts:g} on shard {shard}")

    # ------------------------------------------------------------------ the end

    def ended(self, statistics: dict[int, Any], *, scores: bool) -> None:
        """Check that every shard has applied every ticket exactly once, or accounts for it, and that its ledger says
        so."""
        if scores and self.last_score != self._num_tickets:
            raise Violation(f"the last score is of {self.last_score} batches of {self._num_tickets}")
        for shard in range(len(self._copies.nodes)):
            head = self._copies.head(shard)
            counts = self._copies.counts(head).tolist()
            wrong = [t for t, count in enumerate(counts) if count != 1 and not (count == 0 and t in self._late[shard])]
            if wrong:
                raise Violation(f"at the end tickets {wrong} were not applied exactly once on shard {shard}: {counts}")
            ledger = [t for first, last in statistics[shard].tickets for t in range(first, last + 1)]
            applied = [t for t, count in enumerate(counts) if count == 1]
            if ledger != applied:
                raise Violation(f"shard {shard}'s ledger has tickets {ledger}, its weights have {applied}")


def _key(reply: Reply) -> tuple[int, int, int, int]:
    return reply.shard, reply.worker, reply.incarnation, reply.sequence


def _waits(worker: ChaosWorker, reply: Reply) -> bool:
    awaited = (reply.shard, reply.sequence) in worker.client._pending
    return awaited and reply.incarnation == worker.client.incarnation
