"""A graph as a chain of units: between two units it may be cut, and every segment of units has its costs."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from polytempo.partition.balance import SegmentBytes, prefix
from polytempo.partition.graph.profile import Fact, storage
from polytempo.partition.graph.trace import Traced
from polytempo.partition.graph.values import holds_tensor, parts
from polytempo.partition.graph_stages import positions

_TRAINED = 2
"""A parameter and its gradient."""


class Joint(NamedTuple):
    """Two positions that no cut may separate."""

    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Chain:
    """A model's nodes in the order of their computation, cut into as many units as possible.

    Matrices have the shape (n + 1, n + 1) for n units: at [a, b] what a stage of the units a … b − 1 would cost.
    """

    positions: Mapping[fx.Node, int | None]
    nodes: tuple[fx.Node, ...]
    """The node at each position."""
    begins: tuple[int, ...]
    """The position at which each unit begins."""
    joints: tuple[Joint, ...]
    operations: Tensor
    parameter_bytes: Tensor
    saved_bytes: Tensor
    """Tensors kept from forward to backward, and those received."""
    received_bytes: Tensor
    """Values of earlier stages, forward only."""
    traffic: Tensor
    """The same, and the gradients that go back for them."""
    memory: Tensor
    """Parameters, gradients, the optimizer's state, and what is kept."""
    numbers: Tensor
    """How many parameters, one of several names once."""

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.begins)

    def stage_of(self, ends: tuple[int, ...]) -> dict[fx.Node, int | None]:
        """The stage of every node, where the stages end at these units."""
        first = [self.begins[end] for end in ends[:-1]]
        return {
            node: None if place is None else bisect_right(first, place) - 1 for node, place in self.positions.items()
        }


def chain_of(
    model: nn.Module,
    traced: Traced,
    facts: Mapping[fx.Node, Fact],
    *,
    keep_tied: bool,
    state_per_parameter: float,
) -> Chain:
    """The chain of a graph that has been run."""
    place = positions(traced.graph, facts)
    nodes = _placed(traced.graph, place)
    holders = _holders(model, traced.graph, place)
    joints = [*_in_place(facts, place), *_unsendable(facts, place), *_called_again(model, traced.graph, place)]
    if keep_tied:
        joints += [
            Joint(min(uses), max(uses), f"parameter {name} is used there and before") for name, uses in holders.items()
        ]
    glued = {cut for joint in joints for cut in range(joint.first + 1, joint.last + 1)}
    begins = tuple(number for number in range(len(nodes)) if number not in glued)
    unit = [bisect_right(begins, number) - 1 for number in range(len(nodes))]
    costs = [0.0] * len(begins)
    for number, node in enumerate(nodes):
        costs[unit[number]] += facts[node].operations
    parameter_bytes, numbers = _parameters(model, holders, unit, len(begins))
    received, traffic = _traffic(facts, place, unit, len(begins))
    saved = _saved(facts, place, unit, len(begins))
    memory = parameter_bytes * (_TRAINED + state_per_parameter) + saved
    operations = prefix(costs)
    return Chain(
        place, nodes, begins, tuple(joints), operations, parameter_bytes, saved, received, traffic, memory, numbers
    )


def _placed(graph: fx.Graph, place: Mapping[fx.Node, int | None]) -> tuple[fx.Node, ...]:
    """The first node of each position: those that follow it are its parts."""
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and (at := place[node]) is not None:
            found.setdefault(at, node)
    return tuple(found[at] for at in sorted(found))


def users(node: fx.Node, place: Mapping[fx.Node, int | None]) -> set[int]:
    """Positions of what uses the node, through nodes that stand anywhere."""
    found: set[int] = set()
    for user in node.users:
        at = place[user]
        found |= users(user, place) if at is None else {at}
    return found


# ---------------------------------------------------------------------- what no cut separates


def _in_place(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None]) -> Iterator[Joint]:
    """A tensor, its views and what changes them in place are one: a copy in another stage would not change."""
    aliases: dict[int, list[fx.Node]] = defaultdict(list)
    for node, fact in facts.items():
        for key in _storages(fact.value):
            aliases[key].append(node)
        for key in fact.changed:
            at = place[node]
            assert at is not None, "what changes a tensor has a position"
            there = [place[alias] for alias in aliases[key]]
            known = [each for each in there if each is not None]
            if len(known) < len(there):  # an input or a buffer: every stage that uses it has one of its own
                known = [at, *(each for alias in aliases[key] for each in users(alias, place))]
                yield Joint(min(known), max(known), f"{_label(node)} changes in place what is used there and before")
            else:
                yield Joint(min(known), at, f"{_label(node)} changes it in place")


def _unsendable(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None]) -> Iterator[Joint]:
    """An object that cannot be sent stays with what uses it."""
    for node, fact in facts.items():
        at = place[node]
        if at is not None and node.op != "output":
            try:
                parts(fact.value, node)
            except ValueError as error:
                yield Joint(at, max(users(node, place), default=at), str(error))


def _called_again(model: nn.Module, graph: fx.Graph, place: Mapping[fx.Node, int | None]) -> Iterator[Joint]:
    """A module with buffers that is called several times: its statistics are in one stage."""
    calls: dict[str, list[int]] = defaultdict(list)
    for node in graph.nodes:
        at = place[node]
        if (
            node.op == "call_module"
            and at is not None
            and any(True for _ in model.get_submodule(node.target).buffers())
        ):
            calls[str(node.target)].append(at)
    for name, places in calls.items():
        if len(places) > 1:
            yield Joint(min(places), max(places), f"{name} has buffers and is called there and before")


def _label(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _storages(value: Any) -> set[int]:
    return {storage(each) for each in tree_leaves(value) if isinstance(each, Tensor)}


# ---------------------------------------------------------------------- what segments cost


def _holders(model: nn.Module, graph: fx.Graph, place: Mapping[fx.Node, int | None]) -> dict[str, set[int]]:
    """The positions that use each parameter, by its first name."""
    every = list(model.named_parameters(remove_duplicate=False))
    first = {id(each): name for name, each in reversed(every)}
    found: dict[str, set[int]] = defaultdict(set)
    for node in graph.nodes:
        target, at = str(node.target), place[node]
        if node.op == "call_module" and at is not None:
            for each in model.get_submodule(target).parameters():
                found[first[id(each)]].add(at)
        elif node.op == "get_attr":
            for name, each in every:
                if name == target:
                    found[first[id(each)]] |= users(node, place)
    return found


def _parameters(
    model: nn.Module, holders: Mapping[str, set[int]], unit: list[int], units: int
) -> tuple[Tensor, Tensor]:
    """Bytes and numbers of the parameters of each segment; one that is used twice counts once."""
    tensors = dict(model.named_parameters())
    sizes, numbers = SegmentBytes(units), SegmentBytes(units)
    for name, uses in holders.items():
        there = [unit[use] for use in uses]
        sizes.add(tensors[name].numel() * tensors[name].element_size(), there)
        numbers.add(tensors[name].numel(), there)
    return sizes.matrix(), numbers.matrix()


def _traffic(
    facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None], unit: list[int], units: int
) -> tuple[Tensor, Tensor]:
    """Bytes that each segment receives from earlier ones: forward alone, and with the gradients that it sends back.

    Numbers do not count: most stages that need a size have a tensor to read it from.
    """
    forward, both = SegmentBytes(units), SegmentBytes(units)
    for node, at in place.items():
        if at is None or node.op == "output" or not holds_tensor(facts[node].value):
            continue
        there = [unit[place_of] for user in node.users if (place_of := place[user]) is not None]
        if all(each == unit[at] for each in there):
            continue
        for part in parts(facts[node].value, node):
            forward.add(part.num_bytes, there, after=unit[at])
            both.add(part.num_bytes * (1 + part.requires_grad), there, after=unit[at])
    return forward.matrix(), both.matrix()


def _saved(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None], unit: list[int], units: int) -> Tensor:
    """Bytes that each segment keeps from forward to backward: once for what it computes and saves, or receives."""
    made: dict[int, int] = {}
    sizes: dict[int, int] = {}
    saving: dict[int, set[int]] = defaultdict(set)
    using: dict[int, set[int]] = defaultdict(set)
    for node, fact in facts.items():
        at = place[node]
        for key, size in fact.saved.items():
            sizes[key] = max(size, sizes.get(key, 0))
            if at is not None:
                saving[key].add(unit[at])
        if at is not None:
            for key in _storages(fact.value):
                made.setdefault(key, unit[at])
                using[key] |= {unit[place_of] for user in node.users if (place_of := place[user]) is not None}
                sizes.setdefault(key, sum(part.num_bytes for part in parts(fact.value, node)))
    kept = SegmentBytes(units)
    for key, size in sizes.items():
        source = made.get(key, units)
        kept.add(size, saving[key], until=source)
        kept.add(size, saving[key] | using[key], after=source)
    return kept.matrix()


def has_parameters(chain: Chain) -> Tensor:
    """Which segments have a parameter; all of them, where the model has none."""
    some = chain.numbers > 0
    return some if bool(some.any()) else torch.ones_like(some)
