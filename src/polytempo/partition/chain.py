"""A graph as a chain of n units with costs for each segment, and the best cuts of it into K stages.

A stage is a segment [a, b) of units. Matrices of shape (n + 1, n + 1) have at [a, b] the segment's cost. The cut is
exact, by dynamic programming over the ends of stages:

    minimize the largest:   best[k, b] = min over a of max(best[k − 1, a], cost[a, b])
    minimize the sum:       best[k, b] = min over a of best[k − 1, a] + cost[a, b]

Cost: O(K n²) time, O(n²) memory. Graphs other than chains are taken in the order of the model's computation: the cut is
the best with contiguous stages in that order, and not always the best of all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from polytempo.partition.graph.profile import Fact, storage, tensors_in
from polytempo.partition.graph.trace import Traced
from polytempo.partition.graph_stages import holds_tensor, parts, positions

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

    Matrices have the shape (n + 1, n + 1) for n units: at [a, b] the cost of a stage with the units a … b − 1.
    """

    positions: Mapping[fx.Node, int | None]
    nodes: tuple[fx.Node, ...]
    """The node at each position."""
    begins: tuple[int, ...]
    """The first position of each unit."""
    joints: tuple[Joint, ...]
    operations: Tensor
    parameter_bytes: Tensor
    saved_bytes: Tensor
    """Tensors kept from forward to backward, and received ones."""
    traffic: Tensor
    """Values of earlier stages, and the gradients that go back for them."""
    memory: Tensor
    """Parameters, gradients, the optimizer's state, and kept tensors."""
    numbers: Tensor
    """Parameters; one with several names counts once."""

    @property
    def units(self) -> int:
        """The number of units."""
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
    traffic = _traffic(facts, place, unit, len(begins))
    saved = _saved(facts, place, unit, len(begins))
    memory = parameter_bytes * (_TRAINED + state_per_parameter) + saved
    operations = prefix(costs)
    return Chain(place, nodes, begins, tuple(joints), operations, parameter_bytes, saved, traffic, memory, numbers)


def _placed(graph: fx.Graph, place: Mapping[fx.Node, int | None]) -> tuple[fx.Node, ...]:
    """The first node of each position; nodes that follow it are its parts."""
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output" and (at := place[node]) is not None:
            found.setdefault(at, node)
    return tuple(found[at] for at in sorted(found))


def users(node: fx.Node, place: Mapping[fx.Node, int | None]) -> set[int]:
    """Positions of a node's users, through nodes that stand anywhere."""
    found: set[int] = set()
    for user in node.users:
        at = place[user]
        found |= users(user, place) if at is None else {at}
    return found


# ---------------------------------------------------------------------- joints


def _in_place(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None]) -> Iterator[Joint]:
    """A tensor, its views and the nodes that change them in place are one: a copy in another stage would not change."""
    aliases: dict[int, list[fx.Node]] = defaultdict(list)
    for node, fact in facts.items():
        for key in _storages(fact.value):
            aliases[key].append(node)
        for key in fact.changed:
            at = place[node]
            assert at is not None, "a node that changes a tensor has a position"
            there = [place[alias] for alias in aliases[key]]
            known = [each for each in there if each is not None]
            if len(known) < len(there):  # an input or a buffer: every stage that uses it has one of its own
                known = [at, *(each for alias in aliases[key] for each in users(alias, place))]
                reason = f"{_label(node)} changes in place a tensor that is used there and before"
                yield Joint(min(known), max(known), reason)
            else:
                yield Joint(min(known), at, f"{_label(node)} changes it in place")


def _unsendable(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None]) -> Iterator[Joint]:
    """An object that cannot be sent stays with its users."""
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
    return {storage(each) for each in tensors_in(value)}


# ---------------------------------------------------------------------- costs of segments


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
    """Bytes and numbers of the parameters of each segment; a parameter with several uses counts once."""
    tensors = dict(model.named_parameters())
    sizes, numbers = SegmentBytes(units), SegmentBytes(units)
    for name, uses in holders.items():
        there = [unit[use] for use in uses]
        sizes.add(tensors[name].numel() * tensors[name].element_size(), there)
        numbers.add(tensors[name].numel(), there)
    return sizes.matrix(), numbers.matrix()


def _traffic(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None], unit: list[int], units: int) -> Tensor:
    """Bytes that each segment receives from earlier ones, and of the gradients that it sends back.

    Numbers do not count: most stages that need a size have a tensor to read it from.
    """
    found = SegmentBytes(units)
    for node, at in place.items():
        if at is None or node.op == "output" or not holds_tensor(facts[node].value):
            continue
        there = [unit[place_of] for user in node.users if (place_of := place[user]) is not None]
        if all(each == unit[at] for each in there):
            continue
        for part in parts(facts[node].value, node):
            found.add(part.num_bytes * (1 + part.requires_grad), there, after=unit[at])
    return found.matrix()


def _saved(facts: Mapping[fx.Node, Fact], place: Mapping[fx.Node, int | None], unit: list[int], units: int) -> Tensor:
    """Bytes that each segment keeps from forward to backward: once for computed and saved, or received, tensors."""
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
    """Segments with a parameter; all of them, where the model has none."""
    some = chain.numbers > 0
    return some if bool(some.any()) else torch.ones_like(some)


_ALMOST = 1 + 1e-9
"""Two sums of the same costs differ by rounding."""


def slowest_least(worst: Tensor, total: Tensor, allowed: Tensor, stages: int) -> tuple[int, ...] | None:
    """Ends that minimize the largest `worst` of a segment, and among those the sum of `total`.

    The matrices have the shape (n + 1, n + 1); `allowed` says which segments may be stages. The answer has K + 1 ends,
    0 and n among them; None where no cut into so many allowed segments exists.
    """
    least = total_least(torch.zeros_like(total), worst, allowed, stages)
    if least is None:
        return None
    bound = max(float(worst[a, b]) for a, b in pairwise(least))
    return total_least(total, worst, allowed & (worst <= bound), stages)


def total_least(total: Tensor, worst: Tensor, allowed: Tensor, stages: int) -> tuple[int, ...] | None:
    """Ends that minimize the sum of `total`, and among those the largest `worst`. Arguments as `slowest_least`.

    Among cuts that are equal in both, it takes the one with the earliest last stages.
    """
    units = len(total) - 1
    nowhere = torch.full((units + 1,), torch.inf, dtype=torch.float64)
    sums, largest = nowhere.clone(), torch.zeros(units + 1, dtype=torch.float64)
    sums[0] = 0.0
    behind = torch.ones(units + 1, units + 1, dtype=torch.bool).triu(1) & allowed
    begins = []
    for _ in range(stages):
        to = torch.where(behind, sums[:, None] + total, torch.inf)
        least = to.amin(0)
        most = torch.where(to <= least * _ALMOST, torch.maximum(largest[:, None], worst), torch.inf)
        begin = torch.where(least.isfinite(), most, torch.inf).argmin(0)
        sums, largest = least, most.gather(0, begin[None])[0]
        begins.append(begin)
    if not sums[units].isfinite():
        return None
    ends = [units]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return tuple(reversed(ends))


def prefix(loads: Sequence[float]) -> Tensor:
    """The sum of a segment's loads, shape (n + 1, n + 1)."""
    ends = torch.cat([torch.zeros(1, dtype=torch.float64), torch.tensor(loads, dtype=torch.float64).cumsum(0)])
    return ends[None, :] - ends[:, None]


class SegmentBytes:
    """Bytes that a segment has once, however many of its units use them: sums over such tensors.

    A tensor counts for [a, b) if one of the units that use it is in [a, b). Per use one rectangle of the matrix is
    raised; the sum of all rectangles is taken at the end. Cost: O(uses + n²).
    """

    def __init__(self, units: int) -> None:
        self._corners = torch.zeros(units + 2, units + 2, dtype=torch.float64)

    def add(self, num_bytes: int, uses: Iterable[int], *, after: int = -1, until: int | None = None) -> None:
        """Count the tensor in segments that have a use, and that begin behind the unit `after` (and up to `until`)."""
        last = len(self._corners) - 2 if until is None else until
        begin = after + 1
        for use in sorted(set(uses)):
            end = min(use, last)
            if begin <= end:  # a in [begin, end], b in [use + 1, n]
                self._corners[begin, use + 1] += num_bytes
                self._corners[end + 1, use + 1] -= num_bytes
                begin = end + 1

    def matrix(self) -> Tensor:
        """Bytes of every segment, shape (n + 1, n + 1)."""
        return self._corners.cumsum(0).cumsum(1)[:-1, :-1]
