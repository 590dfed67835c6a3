"""Shards that come and go while training goes on, on a network that loses, repeats and delays."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random

import pytest
import torch

from polytempo.core.rule import Service, UpdateRule
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.chains import ShardLost
from polytempo.server.coordinator.coordinator import Coordinator, Listeners, Nodes
from polytempo.server.coordinator.resharding import Reshaper
from polytempo.server.layout import Parameter, numel_of, shard_map
from polytempo.server.message import Ask, Beat, Deal, Message, Outbox
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.next_push import PendingExchange

TIMING = Timing(retry_s=0.1, longest_retry_s=0.2, beat_s=0.1, lost_s=5.0, worker_lost_s=5.0, starting_s=20.0)
TICKETS, REPEATS, HUB = 60, 3, 100
PARAMETERS = (Parameter("a", TICKETS), Parameter("b", TICKETS * (REPEATS - 1)))
SERVICE = Service(on_arrival(), UpdateRule("sgd", lr=1.0))


class Learner:
    """A worker: its gradient for ticket t is -1 at the elements t, t + 60, t + 120, so weights count tickets."""

    def __init__(self, worker: int, life: int, chains: list[tuple[int, ...]]) -> None:
        self.client = Client(worker, life, shard_map(PARAMETERS, 2), chains[:2], HUB, TIMING)
        self.call: Ask | None = None
        self.calls, self.clock = 0, 0
        self.held: deque[int] = deque()
        self.pending: PendingExchange | None = None
        self.layout, self.ends = 0, False
        self.asked_s = -1.0

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        if not isinstance(message, Deal):
            return self.client.receive(now_s, source, message)
        if self.call is None or message.sequence != self.calls or message.incarnation != self.client.incarnation:
            return []
        if message.layout > self.client.layout:
            return [(HUB, Beat(self.client.worker, self.client.incarnation, self.client.epoch))]
        self.call, self.ends = None, message.order == "finish"
        if self.layout != self.client.layout:  # pull before you push
            self.layout, self.pending = self.client.layout, self.client.pull(self.clock)
        self.held += [ticket.number for ticket in message.tickets]
        return self.client.outbox(now_s)

    def tick(self, now_s: float) -> Outbox:
        client, out = self.client, self.client.tick(now_s)
        if self.pending is None or self.pending.done:
            if self.held:
                self.clock, gradient = self.clock + 1, torch.zeros(TICKETS * REPEATS)
                gradient[self.held[0] :: TICKETS] = -1
                client.begin((self.held.popleft(),), (1.0,), 1)
                self.pending = client.push(gradient, self.clock)
            elif self.call is None:
                self.calls, self.asked_s = self.calls + 1, -1.0
                self.call = Ask(client.worker, client.incarnation, self.calls, client.taken_done())
        if self.call is not None and now_s - self.asked_s > TIMING.retry_s:
            self.asked_s = now_s
            out.append((HUB, self.call))
        return out + client.outbox(now_s)

    @property
    def finished(self) -> bool:
        return self.client.finished


class Net:
    """All nodes, a clock, and a network that drops 10 %, repeats 10 % and delays by up to 50 ms."""

    def __init__(self, seed: int, copies: int) -> None:
        self.random, self.now_s, self.copies = Random(seed), 0.0, copies
        spans = shard_map(PARAMETERS, 2)
        chains = [tuple(range(10 + s * copies, 10 + (s + 1) * copies)) for s in range(2)]
        self.scheduler = BatchScheduler(TICKETS, TICKETS, "freely", workers=3)
        self.hub = Coordinator(
            Nodes(HUB, [0, 1, 2], chains),
            self.scheduler,
            TIMING,
            reshaper=Reshaper(PARAMETERS, spans),
            listeners=Listeners(on_event=self._hear),
        )
        self.machines: dict[int, Coordinator | Node | Learner] = {HUB: self.hub}
        self.events: list[tuple[str, int]] = []
        self._heap: list[tuple[float, int, int, int, Message]] = []
        self._sent = 0
        for shard, chain in enumerate(chains):
            self.start(shard, chain)
        for worker in range(3):
            self.machines[worker] = Learner(worker, 1, chains)

    def _hear(self, event: tuple[str, int]) -> None:
        self.events.append(event)

    def start(self, shard: int, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Processes for copies of a shard with the present layout's elements."""
        spans = self.hub.reshaper.spans[shard] if shard < len(self.hub.reshaper.spans) else ()
        for node in nodes:
            weights = torch.zeros(numel_of(spans))
            machine = Node(node, Shard(shard, PARAMETERS, spans, weights, SERVICE, native=False), HUB, TIMING)
            machine.receive(self.now_s, HUB, self.hub.view)
            self.machines[node] = machine
        return nodes

    def send(self, source: int, out: Outbox) -> None:
        for to, message in out:
            for _ in range(self.random.choices([0, 1, 2], [0.1, 0.8, 0.1])[0]):
                self._sent += 1
                arrives_s = self.now_s + self.random.uniform(0.001, 0.05)
                heapq.heappush(self._heap, (arrives_s, self._sent, source, to, message))

    def run(self, until: Callable[[], bool], most_s: float = 100.0) -> None:
        """Let things happen in steps of 10 ms."""
        end_s = self.now_s + most_s
        while not until():
            assert self.now_s < end_s, f"nothing comes of it: {self.scheduler.done}, {self.hub.reshaper.busy}"
            self.now_s += 0.01
            while self._heap and self._heap[0][0] <= self.now_s:
                _, _, source, to, message = heapq.heappop(self._heap)
                if to in self.machines:
                    self.send(to, self.machines[to].receive(self.now_s, source, message))
            for node, machine in list(self.machines.items()):
                self.send(node, machine.tick(self.now_s))
                if isinstance(machine, Learner) and machine.ends and machine.call is not None:
                    continue
                if node != HUB and machine.finished:
                    del self.machines[node]

    def kill(self, node: int) -> None:
        del self.machines[node]
        self.send(HUB, self.hub.lose(self.now_s, node))

    @property
    def done(self) -> int:
        return sum(last - first + 1 for first, last in self.scheduler.done)

    def weights(self) -> torch.Tensor:
        """The heads' elements, put together; every copy holds the same."""
        flat = torch.full((TICKETS * REPEATS,), -1.0)
        for shard, chain in enumerate(self.hub.chains):
            for node in chain:
                machine = self.machines[node]
                assert isinstance(machine, Node)
                spans = self.hub.reshaper.spans[shard]
                at = 0
                for begin, end in spans:
                    held = machine.shard.weights[at : at + end - begin]
                    assert (flat[begin:end] == -1).all() or torch.equal(flat[begin:end], held)
                    flat[begin:end], at = held, at + end - begin
        return flat


def settled(net: Net, reshapes: int) -> Callable[[], bool]:
    return lambda: sum(event[0] == "reshaped" for event in net.events) == reshapes


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_every_ticket_is_applied_exactly_once_to_every_element(seed: int, copies: int) -> None:
    net = Net(seed, copies)
    net.run(lambda: net.done > 10)
    net.send(HUB, net.hub.add_shard(net.now_s, net.start(2, (20, 21)[:copies])))
    net.run(lambda: net.done > 25)
    net.send(HUB, net.hub.drain_shard(net.now_s, 0))
    net.send(HUB, net.hub.add_shard(net.now_s, net.start(3, (22, 23)[:copies])))
    net.run(lambda: net.done > 40)
    net.send(HUB, net.hub.drain_shard(net.now_s, 3))
    net.run(lambda: net.done == TICKETS and settled(net, 4)())
    assert [bool(spans) for spans in net.hub.reshaper.spans] == [False, True, True, False]
    assert torch.equal(net.weights(), torch.ones(TICKETS * REPEATS))
    assert not {10, 22} & set(net.machines)  # the copies of drained shards have ended


@pytest.mark.parametrize("seed", range(4))
def test_copies_and_workers_may_die_while_elements_move(seed: int) -> None:
    net = Net(seed, copies=2)
    net.run(lambda: net.done > 10)
    net.send(HUB, net.hub.add_shard(net.now_s, net.start(2, (20, 21))))
    net.run(lambda: net.hub.reshaper.moving)
    net.kill(net.random.choice([10, 11, 12, 13, 20, 21]))
    net.kill(net.random.choice([0, 1, 2]))
    net.run(settled(net, 1))
    net.run(lambda: net.done == TICKETS)
    assert torch.equal(net.weights(), torch.ones(TICKETS * REPEATS))


@pytest.mark.parametrize("seed", range(2))
def test_workers_may_join_and_leave_at_any_time(seed: int) -> None:
    net = Net(seed, copies=1)
    net.run(lambda: net.done > 10)
    net.machines[3] = Learner(3, 1, list(net.hub.chains))
    net.run(lambda: any(worker == 3 for worker in net.scheduler.holders().values()))
    net.send(HUB, net.hub.add_shard(net.now_s, net.start(2, (20,))))
    net.machines[4] = Learner(4, 1, list(net.hub.chains))  # which has never heard of shard 2
    net.run(lambda: 3 in net.scheduler.holders().values() or net.done > 40)
    held = [ticket for ticket, worker in net.scheduler.holders().items() if worker == 3]
    net.kill(3)
    net.run(lambda: net.done == TICKETS and settled(net, 1)())
    assert all(any(first <= ticket <= last for first, last in net.scheduler.done) for ticket in held)
    assert ("joined", 4) in net.events
    assert torch.equal(net.weights(), torch.ones(TICKETS * REPEATS))


def test_a_shard_that_never_comes_up_ends_the_run() -> None:
    net = Net(0, copies=1)
    net.run(lambda: net.done > 10)
    net.send(HUB, net.hub.add_shard(net.now_s, (20,)))
    net.run(lambda: net.scheduler.quiet)
    with pytest.raises(ShardLost, match="shard 2 is lost"):
        net.run(lambda: False)


def test_a_reshape_that_could_not_be_is_refused_at_once() -> None:
    spans = shard_map(PARAMETERS, 2)
    one = Reshaper(PARAMETERS, spans)
    one.drain(0)
    with pytest.raises(ValueError, match=r"shard 0 holds nothing .*; drain one of \[1\]"):
        one.drain(0)
    with pytest.raises(ValueError, match="shard 1 is the last one"):
        one.drain(1)
    with pytest.raises(ValueError, match="does not know its shards' ranges"):
        Reshaper().drain(0)
    with pytest.raises(ValueError, match="tables with sparse gradients do not move, and rows is one"):
        Reshaper((Parameter("rows", 180, row_width=3),), spans).add((5,))


def test_a_pause_deals_what_was_begun_and_nothing_else() -> None:
    scheduler = BatchScheduler(6, 12, "evenly", workers=3)
    for worker in range(3):
        scheduler.join(worker, 1)
    first = scheduler.ask(0, 1, 1, ())
    assert first is not None
    scheduler.pause()
    orders = {worker: scheduler.ask(worker, 1, 1, ()) for worker in (1, 2)}
    assert [deal.tickets[0].number for deal in orders.values() if deal is not None] == [1, 2]
    for worker in range(3):
        assert not scheduler.quiet
        wait = scheduler.ask(worker, 1, 2, ())
        assert wait is not None
        assert wait.order == "wait"
        assert scheduler.ask(worker, 1, 3, (worker,)) is None
    assert scheduler.quiet
    scheduler.resume()
    assert [deal.tickets[0].number for deal in scheduler.due()] == [3, 4, 5]
