"""Pushes that workers of a host make together: each gradient counts once, with any loss at any time.

Three workers of a host, one of them its leader, push to two shards of two copies each. The story runs first without a
fault; then again with each fault at each of its messages. Ticket t is -1 at place t of each shard, so weights count.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest
import torch

from polytempo.chaos.copies import new_shard
from polytempo.chaos.planted.bugs import BUGS
from polytempo.chaos.worker import spans
from polytempo.server.message import COORDINATOR, Members, Message, Outbox, Push, View
from polytempo.server.requests import Requests
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.shard.node import Node
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.next_push import PendingExchange

WORKERS, SHARDS, ROUNDS = (0, 1, 2), 2, 3
TICKETS = len(WORKERS) * ROUNDS
CHAINS = ((3, 4), (5, 6))
COORDINATES = 7
TIMING = Timing(retry_s=0.1, longest_retry_s=0.3, beat_s=1e6, lost_s=2e6, deadline_s=60.0)


class Fault(NamedTuple):
    """A fault at message `at`: it is lost, comes twice or last, or `victim` ends."""

    kind: str
    at: int
    victim: int = -1


class Story:
    """The machines, and the mail between them, first in, first out."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.now_s, self.delivered = fault, 0.0, 0
        self.mail = deque[tuple[int, int, Message]]()
        self.held: list[tuple[int, int, Message]] = []
        self.sums = 0
        self.chains, self.epoch, self.alive = list(CHAINS), 1, set(WORKERS)
        self.nodes = {
            node: Node(node, new_shard(shard, SHARDS, TICKETS, on_arrival()), COORDINATES, TIMING)
            for shard, chain in enumerate(CHAINS)
            for node in chain
        }
        layout = spans(SHARDS, TICKETS)
        self.clients = {w: Client(w, 1, layout, CHAINS, COORDINATES, TIMING, peers=WORKERS) for w in WORKERS}
        self.todo = {w: deque((w * ROUNDS + r, False) for r in range(ROUNDS)) for w in WORKERS}
        self.under_way: dict[int, tuple[PendingExchange, torch.Tensor, int]] = {}
        self.noted = [Requests(COORDINATOR, 1, chain[0], TIMING) for chain in CHAINS]
        self.lost: list[int] = []
        self.tell()

    @property
    def view(self) -> View:
        return View(self.epoch, tuple(self.chains), tuple((w, 1) for w in sorted(self.alive)))

    def tell(self) -> None:
        """The coordinator's part: a view to all, and the members to the shards."""
        members = tuple((w, 1) for w in sorted(self.alive))
        for node in [*self.nodes, *sorted(self.alive)]:
            self.mail.append((COORDINATES, node, self.view))
        for shard, asked in enumerate(self.noted):
            asked.add(lambda worker, life, sequence: Members(worker, life, sequence, members))
            again = asked.ask(self.chains[shard][0], self.now_s)
            self.mail.extend((COORDINATES, asked.head, request) for request in [*again, *asked.sendable(self.now_s)])

    def end(self, victim: int) -> None:
        """The process of `victim` ends, and the coordinator sees it."""
        if victim in self.nodes:
            del self.nodes[victim]
            self.chains = [tuple(node for node in chain if node != victim) for chain in self.chains]
        else:
            self.alive.remove(victim)
            unpushed = [ticket for ticket, _ in self.todo[victim]]
            self.lost = [*([self.under_way.pop(victim)[2]] if victim in self.under_way else []), *unpushed]
        self.epoch += 1
        self.tell()

    def post(self, source: int, out: Outbox) -> None:
        for to, message in out:
            self.sums += isinstance(message, Push) and bool(message.parts)
            self.mail.append((source, to, message))

    def deliver(self, source: int, to: int, message: Message) -> None:
        if to in self.alive:
            self.post(to, self.clients[to].receive(self.now_s, source, message))
        elif to in self.nodes:
            self.post(to, self.nodes[to].receive(self.now_s, source, message))
        elif to == COORDINATES and hasattr(message, "shard"):
            self.noted[message.shard].answered(message, self.now_s)  # type: ignore[arg-type]

    def step(self) -> None:
        """The next message; time passes when there is none."""
        if self.mail:
            mail = self.mail.popleft()
            hit = self.delivered == self.fault.at
            self.delivered += 1
            if hit and self.fault.victim >= 0:
                self.end(self.fault.victim)
            if hit and self.fault.kind == "late":
                self.held.append(mail)
            if not (hit and self.fault.kind in ("lost", "late")):
                self.deliver(*mail)
            if hit and self.fault.kind == "twice":
                self.mail.append(mail)
            return
        self.now_s += 0.05
        self.mail.extend((COORDINATES, node, self.view) for node in [*self.nodes, *sorted(self.alive)])
        for worker in sorted(self.alive):
            self.post(worker, self.clients[worker].tick(self.now_s))
        for node in list(self.nodes):
            self.post(node, self.nodes[node].tick(self.now_s))
        self.mail.extend((COORDINATES, a.head, r) for a in self.noted for r in a.late(self.now_s))

    def begin_pushes(self) -> None:
        """Each worker that waits for no push begins its next; a lost worker's tickets come again, each alone."""
        known = not any(asked.unanswered for asked in self.noted)
        if known and self.lost:
            self.todo[min(self.alive)].extend((ticket, True) for ticket in self.lost)
            self.lost = []
        for worker in sorted(self.alive):
            if worker in self.under_way and self.under_way[worker][0].done:
                self.under_way.pop(worker)[1].fill_(1e6)  # no longer lent
            if not known or worker in self.under_way or not self.todo[worker]:
                continue
            client, (ticket, again) = self.clients[worker], self.todo[worker].popleft()
            gradient = torch.zeros(SHARDS * TICKETS)
            gradient[ticket::TICKETS] = -1.0
            client.begin((ticket,), (1.0,), 1)
            client.alone = again
            self.under_way[worker] = client.push(gradient, 1), gradient, ticket
            self.post(worker, client.outbox(self.now_s))

    def told(self) -> Story:
        """Go on to the end; the mail that was held comes last of all."""
        for _ in range(3_000):
            self.begin_pushes()
            if not (self.lost or self.under_way or any(self.todo[w] for w in self.alive) or self.mail):
                if not self.held:
                    return self
                self.mail.extend(self.held)
                self.held = []
            self.step()
        raise AssertionError(f"{self.fault}: not ended; under way {self.under_way}")

    def counts(self) -> list[list[float]]:
        """The number of applications of each ticket, in each copy."""
        return [node.shard.weights.tolist() for node in self.nodes.values()]


def holds(fault: Fault) -> Story:
    story = Story(fault).told()
    assert story.counts() == [[1.0] * TICKETS] * len(story.nodes), fault
    return story


NO_FAULT = Fault("none", -1)
LENGTH = Story(NO_FAULT).told().delivered
"""The number of messages in the story without a fault."""


def test_without_a_fault_one_push_of_each_round_carries_all_but_in_the_first() -> None:
    """No worker has heard of another in the first round."""
    story = holds(NO_FAULT)
    assert story.sums == SHARDS * (ROUNDS - 1)
    assert [node.shard.index for node in story.nodes.values()] == [1 + len(WORKERS) + ROUNDS - 1] * 4


@pytest.mark.parametrize("kind", ["lost", "twice", "late"])
def test_a_message_that_is_lost_or_comes_twice_or_last(kind: str) -> None:
    for at in range(LENGTH):
        holds(Fault(kind, at))


@pytest.mark.parametrize("victim", [0, 1, 3, 4], ids=["leader", "member", "head", "tail"])
def test_a_process_that_ends(victim: int) -> None:
    for at in range(LENGTH):
        holds(Fault("end", at, victim))


FINDS = {
    "rest_of_split_push_admitted": "late",
    "parts_not_remembered": "none",
    "tickets_of_parts_not_kept": "end",
}
"""Bug -> the fault that shows it at some message."""


@pytest.mark.parametrize("bug", FINDS)
def test_planted_bugs_show(bug: str) -> None:
    shown = []
    with BUGS[bug].planted():
        for at in range(LENGTH):
            try:
                holds(Fault(FINDS[bug], at, 1 if FINDS[bug] == "end" else -1))
            except AssertionError:
                shown.append(at)
                break
    assert shown
