"""Chains of copies as numbered stories: all of them have each acknowledged entry, even when copies die."""

from __future__ import annotations

import torch

from polytempo.core.rule import Rule, Service, UpdateRule
from polytempo.server.layout import Parameter, Span
from polytempo.server.message import COORDINATOR, Install, Members, Message, Push, Pushed, Replicate, Replicated, View
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.rules.synchronous_step import quorum
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing

LAUNCHER = 9


class Chain:
    """Copies on nodes 1, 2, …; a message arrives immediately, unless `lost(message, to)`."""

    def __init__(self, nodes: tuple[int, ...], blank: tuple[int, ...] = (), rule: Rule | None = None) -> None:
        rule = rule or on_arrival()
        self.nodes = {node: Node(node, shard(rule), LAUNCHER, Timing(), blank=node in blank) for node in nodes}
        self.now_s = 0.0
        self.heard: list[Message] = []
        """The messages to workers and the coordinator."""
        self.lost = lambda message, to: False
        self.epoch = 0

    def view(self, *chain: int) -> None:
        self.epoch += 1
        for node in self.nodes:
            self.give(LAUNCHER, node, View(self.epoch, (chain,), ((0, 1),)))

    def give(self, source: int, to: int, message: Message) -> None:
        if to not in self.nodes:
            self.heard.append(message)
        elif not self.lost(message, to):
            for receiver, answer in self.nodes[to].receive(self.now_s, source, message):
                self.give(to, receiver, answer)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for node, machine in list(self.nodes.items()):
                for receiver, message in machine.tick(self.now_s):
                    self.give(node, receiver, message)

    def acknowledged(self) -> list[int]:
        return [m.sequence for m in self.heard if isinstance(m, Pushed)]


def shard(rule: Rule) -> Shard:
    service = Service(rule, UpdateRule("sgd"))
    return Shard(0, (Parameter("w", 2),), (Span(0, 2),), torch.zeros(2), service, native=False)


def push(sequence: int) -> Push:
    return Push(0, 1, sequence, sequence, 0, 1, (1.0,), (sequence,), torch.ones(2))


def begun(nodes: tuple[int, ...], blank: tuple[int, ...] = ()) -> Chain:
    chain = Chain(nodes, blank)
    chain.view(*(node for node in nodes if node not in blank))
    chain.give(LAUNCHER, nodes[0], Members(COORDINATOR, 1, 1, ((0, 1),)))
    return chain


def test_a_push_is_acknowledged_when_the_last_copy_has_it() -> None:
    chain = begun((1, 2))
    chain.lost = lambda message, to: isinstance(message, Replicate)
    chain.give(0, 1, push(1))
    assert chain.acknowledged() == []
    chain.lost = lambda message, to: False
    chain.wait(3.0)
    assert chain.acknowledged() == [1]
    assert [node.shard.weights.tolist() for node in chain.nodes.values()] == [[-1.0, -1.0]] * 2


def test_who_moves_up_has_all_that_was_acknowledged_and_repeats_the_answer() -> None:
    chain = begun((1, 2))
    chain.give(0, 1, push(1))
    del chain.nodes[1]
    chain.view(2)
    chain.give(0, 2, push(1))  # the worker never heard the answer
    assert chain.acknowledged() == [1, 1]
    assert chain.nodes[2].shard.weights.tolist() == [-1.0, -1.0]


def test_a_deposed_head_cannot_acknowledge() -> None:
    chain = begun((1, 2))
    chain.nodes[2].receive(0.0, LAUNCHER, View(2, ((2,),), ((0, 1),)))  # the head has not heard of it
    chain.give(0, 1, push(1))
    chain.wait(3.0)
    assert chain.acknowledged() == []


def test_a_copy_without_a_state_is_handed_it_though_the_one_before_it_dies() -> None:
    chain = begun((1, 2, 3), blank=(3,))
    chain.give(0, 1, push(1))
    chain.lost = lambda message, to: isinstance(message, Install)
    chain.view(1, 2, 3)  # the middle one is to hand on its state, and dies before that arrives
    del chain.nodes[2]
    chain.lost = lambda message, to: False
    chain.view(1, 3)
    chain.give(0, 1, push(2))
    chain.wait(6.0)
    assert chain.acknowledged() == [1, 2]
    assert chain.nodes[3].shard.weights.tolist() == [-2.0, -2.0]


def test_confirmations_of_an_old_epoch_do_not_count() -> None:
    chain = begun((1, 2))
    chain.lost = lambda message, to: isinstance(message, Replicate)
    chain.give(0, 1, push(1))
    chain.give(2, 1, Replicated(0, chain.epoch - 1, 99))
    assert chain.acknowledged() == []


def test_the_first_copy_ends_the_window_of_a_rule_and_the_next_one_begins_it_again() -> None:
    chain = Chain((1, 2), rule=quorum(1, grace_s=1.0))
    chain.view(1, 2)
    chain.give(LAUNCHER, 1, Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    chain.give(0, 1, push(1))
    chain.wait(0.8)
    assert chain.acknowledged() == []
    chain.wait(0.4)
    assert chain.acknowledged() == [1]
    assert [node.shard.weights.tolist() for node in chain.nodes.values()] == [[-0.5, -0.5]] * 2
    chain.give(0, 1, push(2))
    chain.wait(0.8)
    del chain.nodes[1]
    chain.view(2)
    chain.wait(0.8)
    assert chain.acknowledged() == [1]
    chain.wait(0.4)
    assert chain.acknowledged() == [1, 2]
    assert chain.nodes[2].shard.weights.tolist() == [-1.0, -1.0]
    assert chain.nodes[2].wait_s(chain.now_s) > 0
