"""Operations of a model that must stay together, or keep their order, for the bits of plain execution.

Operations that do not depend on each other may run at the same time, but for these:

- A change of a tensor in place stays with the operation that makes that tensor, and with all that read it before.
- Operations that draw random numbers, or change the same statistics, run in the order of the program.
- A gradient that is a sum of three or more is summed in autograd's order. The sum of a tensor's uses can be formed
  use by use; where one operation adds two of them, that one's users stay together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from polytempo.partition.graph.profile import Fact, storage, tensors_in
from polytempo.partition.graph_stages import OPERATIONS

_KNOWN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.SymInt)
_STATISTICS = ("batch_norm", "instance_norm")


class OperationUnit(NamedTuple):
    """Operations that run one after the other, on one thread."""

    nodes: tuple[fx.Node, ...]
    """Operations in the order of the program."""
    needs: frozenset[int]
    """Units that come before."""


Facts = Mapping[fx.Node, Fact]
Places = Mapping[fx.Node, int]


def units_of(model: nn.Module, graph: fx.Graph, facts: Facts) -> list[OperationUnit]:
    """The units of a graph that has been run, each behind its needs."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    nodes = [node for node in graph.nodes if node.op in OPERATIONS]
    together = _Together(nodes)
    for group in (*_in_place(place, facts), *_of_unknown_type(facts), *_the_same(facts)):
        together.join(group)
    ordered, gradients = list(_ordered(model, nodes, facts)), uses_of(model, graph, facts)
    while True:
        units = _condensed(nodes, together, ordered)
        unit_of = {node: number for number, unit in enumerate(units) for node in unit.nodes}
        changes = [
            together.join(group)
            for source, uses in gradients.items()
            for group in _inexact(source, uses, place, unit_of)
        ]
        if not any(changes):
            return units


def uses_of(model: nn.Module, graph: fx.Graph, facts: Facts) -> dict[fx.Node | int, dict[fx.Node, int]]:
    """(value, or `id` of a parameter, that gets gradients) -> the number that each operation adds to it."""
    parameters = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    first = one_tensor(facts)
    found: dict[fx.Node | int, dict[fx.Node, int]] = defaultdict(dict)
    for node in graph.nodes:
        if node.op not in OPERATIONS:
            continue
        for used, count in facts[node].uses.items():
            name = used if isinstance(used, str) else str(used.target) if used.op == "get_attr" else None
            source = parameters.get(name) if name is not None else first.get(used)  # type: ignore[arg-type]
            if count and source is not None and not isinstance(source, str):
                found[source][node] = found[source].get(node, 0) + count
    return found


def one_tensor(facts: Facts) -> dict[fx.Node, fx.Node]:
    """(operation) -> the first operation with the same tensor as its value, as for `nn.Identity`, unchanged since."""
    first: dict[int, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node, fact in facts.items():
        if not isinstance(fact.value, Tensor):
            found[node] = node
            continue
        if storage(fact.value) in fact.changed:
            first[id(fact.value)] = node
        found[node] = first.setdefault(id(fact.value), node)
    return found


class _Together:
    """A partition of operations, which grows coarser."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._parents = {node: node for node in nodes}

    def of(self, node: fx.Node) -> fx.Node:
        while self._parents[node] is not node:
            self._parents[node] = node = self._parents[self._parents[node]]
        return node

    def join(self, nodes: Iterable[fx.Node]) -> bool:
        """Make one group of these operations' groups; whether there were several."""
        roots = list(dict.fromkeys(self.of(node) for node in nodes if node in self._parents))
        for root in roots[1:]:
            self._parents[root] = roots[0]
        return len(roots) > 1


# ---------------------------------------------------------------------- operations that stay together


def _in_place(place: Places, facts: Facts) -> Iterator[set[fx.Node]]:
    holders: dict[int, list[fx.Node]] = defaultdict(list)
    last: dict[int, fx.Node] = {}
    for node, fact in facts.items():
        for key in {storage(each) for each in tensors_in(fact.value)}:
            holders[key].append(node)
        last |= dict.fromkeys(fact.changed, node)
    for key, changer in last.items():
        end = place[changer]
        before = [each for each in holders[key] if place[each] < end]
        yield {changer, *before, *(user for each in before for user in each.users)}


def _of_unknown_type(facts: Facts) -> Iterator[set[fx.Node]]:
    """An object that may hide tensors cannot be handed from one unit to another."""
    for node, fact in facts.items():
        if is_opaque(fact.value):
            yield {node, *node.users}


def _the_same(facts: Facts) -> Iterator[set[fx.Node]]:
    """Operations that answer an input, as `pair[0]` and `nn.Identity` do: one tensor has one gradient."""
    for node, fact in facts.items():
        own = {id(each) for each in tensors_in(fact.value)}
        yield {node, *(each for each in node.all_input_nodes if own & {id(t) for t in tensors_in(facts[each].value)})}


def is_opaque(value: Any) -> bool:
    """True if a value is, or has, something that is neither a tensor nor plain."""
    return any(not isinstance(each, (*_KNOWN, torch.Size)) for each in tree_leaves(value))


def _inexact(
    source: fx.Node | int, uses: Mapping[fx.Node, int], place: Places, unit_of: Mapping[fx.Node, int]
) -> Iterator[list[fx.Node]]:
    """Users that must be one unit, for otherwise the sum of this gradient would be formed in another order."""
    if sum(uses.values()) <= 2:
        return
    own = None if isinstance(source, int) else unit_of.get(source)
    inner = [node for node in uses if unit_of[node] == own]
    outer = sorted((node for node in uses if unit_of[node] != own), key=place.__getitem__)
    if len({unit_of[node] for node in outer}) + bool(inner) <= 1:
        return
    late = all(place[node] < place[outer[0]] for node in inner)
    alone = not isinstance(source, int) or len({unit_of[node] for node in outer}) == len(outer)
    if not late or not alone or any(uses[node] > 1 for node in outer[:-1]):
        yield [*uses] if isinstance(source, int) or not inner else [source, *uses]


# ---------------------------------------------------------------------- operations that keep their order


def _ordered(model: nn.Module, nodes: Sequence[fx.Node], facts: Facts) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of operations; the first one comes first."""
    before: dict[Hashable, fx.Node] = {}
    for node in nodes:
        for effect in _effects(model, node, facts):
            if effect in before:
                yield before[effect], node
            before[effect] = node


def _effects(model: nn.Module, node: fx.Node, facts: Facts) -> set[Hashable]:
    """Other changes by an operation: the generator of random numbers, statistics, a module's own attributes."""
    found: set[Hashable] = {"random numbers"} if facts[node].draws else set()
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        found |= {id(each) for each in module.buffers()}
        found |= {id(each) for each in module.modules() if _has_own_code(each)}
    elif any(word in str(node.target) + node.name for word in _STATISTICS):
        found |= {each.target for each in node.all_input_nodes if each.op == "get_attr"}
    return found


def _has_own_code(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.") or has_hooks(module)


# ---------------------------------------------------------------------- units


def _condensed(
    nodes: Sequence[fx.Node], together: _Together, ordered: Sequence[tuple[fx.Node, fx.Node]]
) -> list[OperationUnit]:
    """The groups, each behind its needs; groups that need each other are joined."""
    while True:
        members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        needs: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in nodes:
            members[together.of(node)].append(node)
            needs[together.of(node)] |= {together.of(each) for each in node.all_input_nodes if each.op in OPERATIONS}
        for first, second in ordered:
            needs[together.of(second)].add(together.of(first))
        order = _in_order(members, needs)
        if order is not None:
            break
        for circle in _circles(members, needs):
            together.join(circle)
    number = {root: position for position, root in enumerate(order)}
    return [
        OperationUnit(tuple(members[root]), frozenset(number[each] for each in needs[root] if each is not root))
        for root in order
    ]


def _in_order(
    members: Mapping[fx.Node, Sequence[fx.Node]], needs: Mapping[fx.Node, set[fx.Node]]
) -> list[fx.Node] | None:
    """The groups, each behind its needs; None where some need each other."""
    done: dict[fx.Node, None] = {}
    left = list(members)
    while left:
        before = len(done)
        for root in left:
            if all(each in done or each is root for each in needs[root]):
                done[root] = None
        if len(done) == before:
            return None
        left = [root for root in left if root not in done]
    return list(done)


def _circles(
    members: Mapping[fx.Node, Sequence[fx.Node]], needs: Mapping[fx.Node, set[fx.Node]]
) -> Iterator[set[fx.Node]]:
    """Groups of groups that need each other."""
    number = {root: position for position, root in enumerate(members)}
    behind = {root: 1 << position for root, position in number.items()}
    grows = True
    while grows:
        grows = False
        for root in members:
            reach = behind[root]
            for each in needs[root]:
                reach |= behind[each]
            grows |= reach != behind[root]
            behind[root] = reach
    for root in members:
        same = {each for each in members if behind[root] >> number[each] & 1 and behind[each] >> number[root] & 1}
        if len(same) > 1:
            yield same


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """True if there are some."""
    return any(getattr(module, name) for name in HOOKS)
