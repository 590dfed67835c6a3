"""`Copies`: where each shard's copies are, and how often they have applied each ticket. The checkers read it."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from polytempo.chaos.world import Violation, World
from polytempo.core.codec import Codec, PullCodec
from polytempo.core.rule import Rule, Service, UpdateRule
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.layout import Parameter, Span
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.score_snapshots import Showing

_MOST_HELD = 200
"""The most replies kept back or entries not confirmed: each worker has few requests, so more is a leak."""


def counted(num_shards: int, num_tickets: int) -> tuple[Parameter, ...]:
    """The parameters of all shards: a number for each ticket and shard."""
    return (Parameter("counts", num_shards * num_tickets),)


def new_shard(
    number: int,
    num_shards: int,
    num_tickets: int,
    rule: Rule,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
) -> Shard:
    """A shard with a weight of 0 for each ticket, and SGD."""
    span = Span(number * num_tickets, (number + 1) * num_tickets)
    service = Service(rule, UpdateRule("sgd"), codec=codec, pull_codec=pull_codec)
    parameters = counted(num_shards, num_tickets)
    return Shard(number, parameters, (span,), torch.zeros(num_tickets), service, native=False)


class Copies:
    """`nodes[s]` may hold a copy of shard s; `coordinator` knows which of them do."""

    def __init__(self, workers: tuple[int, ...], nodes: tuple[tuple[int, ...], ...], world: World) -> None:
        self.workers, self.nodes = workers, nodes
        self.coordinator: Coordinator
        self._world = world
        self._shards = {node: shard for shard, holders in enumerate(nodes) for node in holders}

    def shard_of(self, node: int) -> int:
        """The shard with a copy on `node`, now or later."""
        return self._shards[node]

    def counts(self, node: Node) -> Tensor:
        """The count of each ticket, from this copy's weights, sum and regions' movements, shape (tickets,)."""
        weights = node.shard._weights
        if weights.summed and weights.total is not None:
            return weights.present - weights.total
        return sum((region.weights.present - region.begun for region in node.shard._regions), weights.present)

    def node(self, number: int) -> Node | None:
        """The copy on node `number`, if it lives and has a state."""
        machine = node_of(self._world.machine(number))
        return machine if machine is not None and not machine.blank else None

    def head(self, shard: int) -> Node:
        """The first copy, which answers requests."""
        node = self.node(self.coordinator.chains[shard][0])
        if node is None:
            raise Violation(f"the head of shard {shard} is dead, or has no state")
        return node

    def is_current(self, node: Node) -> bool:
        """True if the coordinator counts on this copy, and the copy knows that."""
        return node.epoch == self.coordinator.epoch and node.node in self.coordinator.chains[node.shard.number]

    def whole(self, shard: int) -> bool:
        """True if all copies of a shard are there, know of each other, and have a state."""
        chain = self.coordinator.chains[shard]
        nodes = [node for number in chain if (node := self.node(number)) is not None]
        complete = len(nodes) == len(self.nodes[shard]) and all(self.is_current(node) for node in nodes)
        return complete and all(node._install is None for node in nodes)

    def agree(self, node: Node) -> None:
        """Check that copies in the same epoch and after the same entry have the same state."""
        if not self.is_current(node):
            return
        for number in self.coordinator.chains[node.shard.number]:
            other = self.node(number)
            if other is None or other is node or (other.epoch, other.index) != (node.epoch, node.index):
                continue
            if not _same(node.shard, other.shard):
                raise Violation(
                    f"nodes {node.node} and {number} differ in shard {node.shard.number} after entry {node.index}: "
                    f"{_facts(node.shard)} and {_facts(other.shard)}"
                )

    def bounded(self, node: Node) -> None:
        """Raise `Violation` where a copy keeps more and more in memory."""
        held = len(node._held), len(node._log), len(node._unsaid), len(node.shard._weights.buffers.tensors)
        if max(held) > _MOST_HELD:
            raise Violation(f"node {node.node} keeps more and more: replies, entries, requests, buffers {held}")


def node_of(machine: object) -> Node | None:
    """The copy of a shard that a process is; None for any other machine."""
    machine = machine.node if isinstance(machine, Showing) else machine
    return machine if isinstance(machine, Node) else None


def _same(one: Shard, other: Shard) -> bool:
    mine, theirs = one._weights, other._weights
    if _facts(one) != _facts(other) or not torch.equal(mine.present, theirs.present):
        return False
    for region, its in zip(one._regions, other._regions, strict=True):
        if not (torch.equal(region.weights.present, its.weights.present) and torch.equal(region.begun, its.begun)):
            return False
    return not mine.summed or (
        mine.total is not None and theirs.total is not None and torch.equal(mine.total, theirs.total)
    )


def _facts(shard: Shard) -> tuple[object, ...]:
    """A shard's state without its tensors."""
    known = {worker: (k.incarnation, k.last, *sorted(k.answers)) for worker, k in shard._answers.known.items()}
    waiting = {w: [(one.kind, one.sequence) for one in queue] for w, queue in shard._queues.waiting.items() if queue}
    weights = shard._weights
    rule = msgspec.msgpack.encode(shard._rule)  # a list and a tuple are the same to rules
    return (
        *(weights.version, shard.index, weights.steps, weights.summed, rule, shard._roster.members, known, waiting),
        *(shard.decisions.applied.tuples, shard.decisions.dropped, shard.decisions.refused),
        {number: region.version for number, region in shard._regions.dump().items()},
    )
