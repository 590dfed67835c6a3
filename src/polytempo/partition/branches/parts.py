"""A model's graph in parts: stretches that run as they are, and regions with tasks that may run at the same time.

    embed ──┬── tower a ──┬── scores        stretch: embed     region: tasks a and b     stretch: scores
            └── tower b ──┘

A unit that each other one comes before or after, as `scores`, ends a group that may run at the same time. Between two
such units is a region, if running its tasks at the same time is worth it. The parts follow each other in the order of
the program, so autograd sums gradients between them as it does without parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from polytempo.partition.branches.units import (
    Facts,
    OperationUnit,
    Places,
    is_opaque,
    one_tensor,
    units_of,
    uses_of,
)
from polytempo.partition.graph.trace import Traced
from polytempo.partition.graph_stages import with_constants


class TakenValue(NamedTuple):
    """An input of a piece of code."""

    source: fx.Node
    """The operation, or the model's input, that it comes from."""
    position: int
    """The place of the operation that uses it, or of the first one."""


class Code(NamedTuple):
    """Operations as a function: `run(model, *values of takes)` answers the values of `gives`."""

    run: Callable[..., Any]
    takes: tuple[TakenValue, ...]
    constants: tuple[Tensor, ...]
    """Tensors that follow the values."""
    gives: tuple[fx.Node, ...]
    modules: tuple[tuple[str, int], ...]
    """Modules and parameters that it uses, by name, each with the position of its last use."""
    operations: float
    """Operations of forward and backward; see `profile.counted`."""

    def __call__(self, model: nn.Module, values: Sequence[Any]) -> Any:
        """The values of `gives` for the values of `takes`."""
        return self.run(model, *values, *self.constants)


class BranchTask(NamedTuple):
    """Operations of a region that one thread runs, one after the other."""

    code: Code
    needs: tuple[int, ...]
    """Tasks of the region that come before."""
    name: str
    """The first and the last operation: `towers.0.0 … towers.0.4`."""

    @property
    def operations(self) -> float:
        """Operations of forward and backward."""
        return self.code.operations


class Region(NamedTuple):
    """Tasks that may run at the same time, as far as none needs another."""

    tasks: tuple[BranchTask, ...]
    gives: tuple[fx.Node, ...]
    """Values that are used behind it."""

    @property
    def operations(self) -> float:
        """Operations of all tasks."""
        return sum(task.operations for task in self.tasks)

    @property
    def longest(self) -> float:
        """Operations of the tasks that must come one after the other."""
        return max(self.remaining(backward=True), default=0.0)

    def remaining(self, *, backward: bool = False) -> list[float]:
        """Each task's operations, with the operations of the longest way behind it; `backward`: before it."""
        found = [task.operations for task in self.tasks]
        pairs = [(number, need) for number, task in enumerate(self.tasks) for need in task.needs]
        for number, need in pairs if backward else reversed(pairs):
            one, other = (number, need) if backward else (need, number)
            found[one] = max(found[one], self.tasks[one].operations + found[other])
        return found


class BranchedModel(NamedTuple):
    """A model as code that runs in order, and regions of branches."""

    inputs: tuple[fx.Node, ...]
    parts: tuple[Code | Region, ...]
    last_uses: tuple[tuple[fx.Node, ...], ...]
    """Values that no part behind each part uses."""
    output: Code
    shares_parameters: bool
    """True if several operations use one parameter."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """Parts that have tasks."""
        return tuple(part for part in self.parts if isinstance(part, Region))


def parts_of(model: nn.Module, traced: Traced, facts: Facts, *, threads: int, least_operations: float) -> BranchedModel:
    """The parts of a graph that has been run. A region saves at least so many operations on so many threads."""
    graph = traced.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    units = units_of(model, graph, facts)
    gradients = uses_of(model, graph, facts)
    parameters = _parameters(gradients)
    found: list[Code | Region] = []
    stretch: list[fx.Node] = []
    [end] = [node for node in graph.nodes if node.op == "output"]
    coding = _Coding(model, traced, facts, place)

    def end_stretch() -> None:
        if stretch:
            found.append(coding.code(stretch))
            stretch.clear()

    for group in _between(units, place):
        nodes = [node for number in group for node in units[number].nodes]
        region = None
        if len(group) > 1 and all(coding.leaves(node) for node in nodes):
            region = coding.region(_chained(units, group, parameters))
        if region is not None and len(region.tasks) > 1 and _saved(region, threads) >= least_operations:
            end_stretch()
            found.append(region)
        else:
            stretch += nodes
    end_stretch()
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    shares = any(isinstance(source, int) and len(uses) > 1 for source, uses in gradients.items())
    return BranchedModel(inputs, tuple(found), _last_uses(found, end), coding.code([end]), shares)


def _saved(region: Region, threads: int) -> float:
    return region.operations - max(region.longest, region.operations / threads)


def _between(units: Sequence[OperationUnit], place: Places) -> list[list[int]]:
    """Units one by one where each other one is before or behind, and the others between them together."""
    first = [place[unit.nodes[0]] for unit in units]
    last = [place[unit.nodes[-1]] for unit in units]
    before = _reaching(units)
    behind = [0] * len(units)
    for number, mask in enumerate(before):
        for other in range(len(units)):
            behind[other] |= (mask >> other & 1) << number
    groups: list[list[int]] = [[]]
    for number in sorted(range(len(units)), key=first.__getitem__):
        whole = before[number].bit_count() + behind[number].bit_count() == len(units) - 1
        apart = all(
            (last[other] < first[number]) if before[number] >> other & 1 else first[other] > last[number]
            for other in range(len(units))
            if other != number
        )
        if whole and apart:
            groups += [[number], []]
        else:
            groups[-1].append(number)
    return [sorted(group) for group in groups if group]


def _reaching(units: Sequence[OperationUnit]) -> list[int]:
    """The units that come before each, as bits."""
    found: list[int] = []
    for unit in units:
        mask = 0
        for need in unit.needs:
            mask |= found[need] | 1 << need
        found.append(mask)
    return found


def _parameters(gradients: Mapping[fx.Node | int, Mapping[fx.Node, int]]) -> dict[fx.Node, set[int]]:
    """The parameters, by their `id`, that each operation adds to the gradients of."""
    found: dict[fx.Node, set[int]] = defaultdict(set)
    for source, uses in gradients.items():
        if isinstance(source, int):
            for node in uses:
                found[node].add(source)
    return found


def _chained(
    units: Sequence[OperationUnit], group: Sequence[int], parameters: Mapping[fx.Node, set[int]]
) -> list[OperationUnit]:
    """The units of a group; a unit that is the only one behind another is joined to it. `needs` are numbers in the
    answer.

    Two units that use one parameter stay apart: its gradients are added one by one.
    """
    needs = {number: units[number].needs & set(group) for number in group}
    users = {number: [other for other in group if number in needs[other]] for number in group}
    own = {number: {each for node in units[number].nodes for each in parameters.get(node, ())} for number in group}
    chains: dict[int, list[int]] = {}
    chain_of: dict[int, int] = {}
    for number in group:
        before = next(iter(needs[number])) if len(needs[number]) == 1 else None
        alone = before is not None and len(users[before]) == 1
        chain = chain_of[before] if alone and before is not None else number
        if any(own[number] & own[other] for other in chains.get(chain, ())):
            chain = number
        chains.setdefault(chain, []).append(number)
        chain_of[number] = chain
    place = {chain: position for position, chain in enumerate(chains)}
    return [
        OperationUnit(
            tuple(node for number in chain for node in units[number].nodes),
            frozenset(place[chain_of[need]] for need in needs[first]),
        )
        for first, chain in chains.items()
    ]


def _last_uses(parts: Sequence[Code | Region], end: fx.Node) -> tuple[tuple[fx.Node, ...], ...]:
    seen = set(end.all_input_nodes)
    found: list[tuple[fx.Node, ...]] = []
    for part in reversed(parts):
        codes = [part] if isinstance(part, Code) else [task.code for task in part.tasks]
        within = {node for code in codes for node in code.gives} - set(part.gives)
        own = {take.source for code in codes for take in code.takes} - within
        found.append(tuple(own - seen))
        seen |= own
    return tuple(reversed(found))


# ---------------------------------------------------------------------- code


class _Coding:
    """Makes functions of a graph's operations, which look up modules and parameters in the model at each call."""

    def __init__(self, model: nn.Module, traced: Traced, facts: Facts, place: Places) -> None:
        self._constants, self._facts, self._place = traced.constants, facts, place
        self._first = one_tensor(facts)
        self._held = with_constants(model, traced.constants)

    def region(self, units: Sequence[OperationUnit]) -> Region:
        inside = {node for unit in units for node in unit.nodes}
        tasks = [
            BranchTask(
                self.code(unit.nodes),
                tuple(sorted(unit.needs)),
                _name(unit.nodes),
            )
            for unit in units
        ]
        return Region(tuple(tasks), tuple(node for node in inside if set(node.users) - inside))

    def code(self, nodes: Sequence[fx.Node]) -> Code:
        nodes = sorted(nodes, key=self._place.__getitem__)
        keys = self._keys(nodes)
        graph = fx.Graph()
        made: dict[Any, Any] = {
            key: graph.placeholder(f"given_{n}") for n, key in enumerate(dict.fromkeys(keys.values()))
        }
        constants = list(dict.fromkeys(name for node in nodes for name in self._constants_of(node)))
        fixed = {name: graph.placeholder(f"constant_{number}") for number, name in enumerate(constants)}
        takes = [TakenValue(source, self._place[user or first_use(source, nodes)]) for source, user in made]

        def copied(node: fx.Node, structure: Any) -> Any:
            def argument(each: fx.Node) -> Any:
                if each.op == "get_attr":
                    target = str(each.target)
                    return fixed[target] if target in fixed else graph.get_attr(target)
                return made[keys[each, node]] if (each, node) in keys else made[each]

            return fx.node.map_arg(structure, argument)

        for node in nodes:
            if node.op == "output":
                graph.output(copied(node, node.args[0]))
            else:
                args, kwargs = copied(node, node.args), copied(node, node.kwargs)
                made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        own = set(nodes)
        gives = tuple(node for node in nodes if set(node.users) - own)
        if nodes[-1].op != "output":
            graph.output(tuple(made[node] for node in gives))
        run = type(fx.GraphModule(self._held, graph)).forward
        tensors = tuple(self._constants[name] for name in constants)
        operations = sum(self._facts[node].operations for node in nodes)
        return Code(run, tuple(takes), tensors, gives, tuple(self._modules(nodes)), operations)

    def _keys(self, nodes: Sequence[fx.Node]) -> dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node | None]]:
        """(value from elsewhere, user) -> (value, user), or (value, None) where one alias serves all uses.

        Gradients of aliases are added one by one to other operations' gradients. Autograd adds them so, too, but for an
        operation that adds several; then all users are here, and one alias serves them.
        """
        own = set(nodes)
        found: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node | None]] = {}
        served: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if source in own or source.op == "get_attr":
                    continue
                adding = self._adding(source)
                if set(adding) <= own and any(count > 1 for count in adding.values()):
                    found[source, node] = served.setdefault(self._first[source], source), None
                else:
                    found[source, node] = source, node
        return found

    def _adding(self, source: fx.Node) -> Counter[fx.Node]:
        """The number of gradients that each operation adds to the gradient of the source's tensor, under any of its
        names."""
        same = [each for each, first in self._first.items() if first is self._first[source]]
        return +Counter({user: sum(self._count(each, user) for each in same) for each in same for user in each.users})

    def _count(self, source: fx.Node, user: fx.Node) -> int:
        if user.op == "output":
            return int(source in user.all_input_nodes)
        return self._facts[user].uses.get(source, 0)

    def leaves(self, node: fx.Node) -> bool:
        """True if an operation's value and gradients can leave a region: the model's output adds to gradients, too."""
        if is_opaque(self._facts[node].value) and any(user.op == "output" for user in node.users):
            return False
        several = [each for each, count in self._facts[node].uses.items() if isinstance(each, fx.Node) and count > 1]
        return not any(user.op == "output" for each in several if each.op != "get_attr" for user in self._adding(each))

    def _constants_of(self, node: fx.Node) -> list[str]:
        targets = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
        return [target for target in targets if target in self._constants]

    def _modules(self, nodes: Sequence[fx.Node]) -> list[tuple[str, int]]:
        found: dict[str, int] = {}
        for node in nodes:
            called = [str(node.target)] if node.op == "call_module" else []
            read = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
            for name in (*called, *(each for each in read if each not in self._constants)):
                found[name] = max(found.get(name, 0), self._place[node])
        return list(found.items())


def first_use(source: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node:
    """The first of these operations that uses the value."""
    return next(node for node in nodes if source in node.all_input_nodes)


def _name(nodes: Sequence[fx.Node]) -> str:
    names = [str(node.target) if node.op == "call_module" else node.name for node in nodes]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
