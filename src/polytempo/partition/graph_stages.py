"""Stages of a graph: the nodes and the module of each, and the values that pass between them.

Tensors cross a cut as they are, numbers as tensors of one element, constants not at all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from polytempo.partition.cut import Stage, Value
from polytempo.partition.graph.profile import Fact, is_pick
from polytempo.partition.graph.trace import Inputs, Traced

OPERATIONS = ("call_module", "call_function", "call_method")


def positions(graph: fx.Graph, facts: Mapping[fx.Node, Fact]) -> dict[fx.Node, int | None]:
    """Each node's place among nodes that a cut can divide: 0, 1, … in the order of the graph. None: anywhere.

    A part of a tuple stands where the tuple is. Sizes and other values without tensors stand at the last of their
    sources, and anywhere if these are only the model's inputs and parameters: each stage that needs them computes them.
    The output stands with the last node.
    """
    found: dict[fx.Node, int | None] = {}
    count = 0
    for node in graph.nodes:
        before = [place for each in node.all_input_nodes if (place := found[each]) is not None]
        if node.op not in OPERATIONS:
            found[node] = max(count - 1, 0) if node.op == "output" else None
        elif _is_part(node, facts) or _is_size(node, facts):
            found[node] = max(before, default=None)
        else:
            found[node] = count
            count += 1
    return found


def _is_part(node: fx.Node, facts: Mapping[fx.Node, Fact]) -> bool:
    whole = node.args[0] if node.args else None
    return is_pick(node) and isinstance(whole, fx.Node) and not isinstance(facts[whole].value, Tensor)


def _is_size(node: fx.Node, facts: Mapping[fx.Node, Fact]) -> bool:
    """True if the node computes sizes or the like, so that to compute it again is as good as to send it."""
    fact = facts[node]
    return node.op in OPERATIONS[1:] and not fact.changed and not holds_tensor(fact.value)


class _Division(NamedTuple):
    facts: Mapping[fx.Node, Fact]
    stage_of: Mapping[fx.Node, int | None]
    copies: Set[tuple[fx.Node, int]]
    """Sizes that a later stage computes again, for it has their sources."""
    crossing: Mapping[fx.Node, Sequence[int]]
    """Nodes that other stages use, with these stages."""

    def members(self, graph: fx.Graph, index: int) -> set[fx.Node]:
        """The nodes of stage `index`: its own, and needed nodes that stand anywhere."""
        found = {node for node in graph.nodes if self.stage_of[node] == index}
        for node in reversed(graph.nodes):
            anywhere = self.stage_of[node] is None or (node, index) in self.copies
            if anywhere and any(user in found for user in node.users):
                found.add(node)
        return found


def _divided(graph: fx.Graph, facts: Mapping[fx.Node, Fact], stage_of: Mapping[fx.Node, int | None]) -> _Division:
    last = max(stage for stage in stage_of.values() if stage is not None)
    direct = {
        node: {stage for user in node.users if (stage := stage_of[user]) is not None} - {stage_of[node]}
        for node in graph.nodes
        if stage_of[node] is not None
    }
    copies: set[tuple[fx.Node, int]] = set()

    def has(node: fx.Node, stage: int) -> bool:
        arrives = node in direct and stage in direct[node] and holds_tensor(facts[node].value)
        return stage_of[node] in (None, stage) or (node, stage) in copies or arrives

    for node in direct:
        if _is_size(node, facts):
            own = stage_of[node] or 0
            copies |= {(node, s) for s in range(own + 1, last + 1) if all(has(e, s) for e in node.all_input_nodes)}
    crossing = {
        node: targets
        for node, stages in direct.items()
        if (targets := sorted(stage for stage in stages if stage is not None and (node, stage) not in copies))
    }
    return _Division(facts, stage_of, copies, crossing)


def split(
    model: nn.Module,
    traced: Traced,
    facts: Mapping[fx.Node, Fact],
    inputs: Inputs,
    stage_of: Mapping[fx.Node, int | None],
) -> tuple[list[Stage], dict[Value, int]]:
    """The stages, and the values with their bytes. `stage_of`: None for nodes that each stage has if it needs them."""
    last = max(stage for stage in stage_of.values() if stage is not None)
    division = _divided(traced.graph, facts, stage_of)
    values = {
        Value(part.name(node), stage_of[node] or 0, tuple(targets), part.requires_grad): part.num_bytes
        for node, targets in division.crossing.items()
        for part in parts(facts[node].value, node)
    }
    stages = []
    for index in range(last + 1):
        graph, takes, gives = _stage_graph(traced.graph, division, index)
        used = [node.target for node in graph.nodes if node.op == "placeholder"]
        given = tuple(name for name in inputs.names if name in used)
        module = _module(model, traced, graph, index, is_last=index == last)
        stages.append(Stage(index, module, given, takes, gives, index == last))
    return stages, values


def _stage_graph(whole: fx.Graph, division: _Division, index: int) -> tuple[fx.Graph, tuple[str, ...], tuple[str, ...]]:
    """The graph of one stage, and the names of the values that it takes and gives."""
    facts, members = division.facts, division.members(whole, index)
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in whole.nodes:
        if node.op == "placeholder" and node in members:
            made[node] = graph.node_copy(node)
    takes: list[str] = []
    arrived: dict[fx.Node, dict[Path, fx.Node]] = {}
    for node, targets in division.crossing.items():
        if index in targets:
            there = parts(facts[node].value, node)
            arrived[node] = {part.path: graph.placeholder(part.name(node).replace(".", "_")) for part in there}
            takes += [part.name(node) for part in there]
    for node, placeholders in arrived.items():
        made[node] = received(graph, facts[node].value, placeholders)
    answer: list[Any] = []
    for node in whole.nodes:
        if node in members and node.op == "output":
            answer = [fx.node.map_arg(node.args[0], lambda each: made[each])]
        elif node in members and node.op != "placeholder":
            made[node] = graph.node_copy(node, lambda each: made[each])
    own = [node for node in division.crossing if division.stage_of[node] == index]
    given = [(node, part) for node in own for part in parts(facts[node].value, node)]
    graph.output((*(sent(graph, made[node], part) for node, part in given), *answer))
    graph.lint()
    return graph, tuple(takes), tuple(part.name(node) for node, part in given)


# ---------------------------------------------------------------------- modules


def _module(model: nn.Module, traced: Traced, graph: fx.Graph, index: int, *, is_last: bool) -> nn.Module:
    """The stage as a module with the model's names. Parameters that no stage uses stay in the last one."""
    held = model if not traced.constants else with_constants(model, traced.constants)
    module = fx.GraphModule(held, graph, class_name=f"Stage{index}")
    if is_last:
        for name in _unused(model, traced.graph):
            _attach(module, name, operator.attrgetter(name)(model))
    kept = set(model.state_dict())
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if name not in kept:
            owner, _, field = name.rpartition(".")
            module.get_submodule(owner).register_buffer(field, buffer, persistent=False)
    for name, each in module.named_modules(remove_duplicate=False):
        each.training = model.get_submodule(name).training
    return module


def with_constants(model: nn.Module, constants: Mapping[str, Tensor]) -> nn.Module:
    """A module with the model's attributes and these tensors."""
    held = nn.Module()
    held.__dict__.update({**model.__dict__, **constants})
    return held


def _unused(model: nn.Module, graph: fx.Graph) -> list[str]:
    used = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, _ in tensors if not used & set(accumulate(name.split("."), "{}.{}".format))]


def _attach(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a parameter or buffer under its dotted name, with modules on the way where there are none."""
    *owners, field = name.split(".")
    for owner in owners:
        if not hasattr(module, owner):
            module.add_module(owner, nn.Module())
        module = getattr(module, owner)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(field, tensor)
    else:
        module.register_buffer(field, tensor)


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_CONSTANTS = (str, torch.dtype, torch.device, torch.layout, type(None), type(...))
Path = tuple[int | str, ...]


class Part(NamedTuple):
    """A piece of a node's value that crosses: its place in the value, and the tensor or number there."""

    path: Path
    piece: Any

    def name(self, node: fx.Node) -> str:
        """`node`, or `node.0`, `node.1` where the node's value is a tuple."""
        return ".".join((node.name, *map(str, self.path)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, or of the number."""
        if isinstance(self.piece, Tensor):
            return self.piece.numel() * self.piece.element_size()
        return _NUMBERS[type(self.piece)].itemsize

    @property
    def requires_grad(self) -> bool:
        """True if a gradient comes back."""
        return isinstance(self.piece, Tensor) and self.piece.requires_grad


def parts(value: Any, node: fx.Node) -> list[Part]:
    """The tensors and numbers of a value. ValueError for an object that can neither be sent nor made again."""
    return list(_parts(value, (), node))


def _parts(value: Any, path: Path, node: fx.Node) -> Iterator[Part]:
    if isinstance(value, Tensor) or type(value) in _NUMBERS:
        yield Part(path, value)
    elif isinstance(value, tuple | list):
        for number, piece in enumerate(value):
            yield from _parts(piece, (*path, number), node)
    elif isinstance(value, Mapping):
        for key, piece in value.items():
            yield from _parts(piece, (*path, key), node)
    elif not isinstance(value, _CONSTANTS):
        raise ValueError(
            f"{node.name} is a {type(value).__name__}, and a later stage uses it; tensors, numbers, and tuples, lists "
            "and dicts of them can pass from stage to stage"
        )


def holds_tensor(value: Any) -> bool:
    """True if there is a tensor in the value."""
    if isinstance(value, tuple | list):
        return any(holds_tensor(piece) for piece in value)
    if isinstance(value, Mapping):
        return any(holds_tensor(piece) for piece in value.values())
    return isinstance(value, Tensor)


def sent(graph: fx.Graph, node: fx.Node, part: Part) -> fx.Node:
    """Nodes that take the part out of `node`, in the graph of the stage that computes it."""
    for step in part.path:
        node = graph.call_function(operator.getitem, (node, step))
    if isinstance(part.piece, Tensor):
        return node
    return graph.call_function(torch.tensor, (node,), {"dtype": _NUMBERS[type(part.piece)]})


def received(graph: fx.Graph, value: Any, placeholders: Mapping[Path, fx.Node], path: Path = ()) -> Any:
    """The value again, out of a stage's received tensors, as an argument of its graph."""
    if path in placeholders:
        node = placeholders[path]
        return node if isinstance(value, Tensor) else graph.call_method("item", (node,))
    if isinstance(value, tuple):
        return tuple(received(graph, piece, placeholders, (*path, number)) for number, piece in enumerate(value))
    if isinstance(value, list):
        return [received(graph, piece, placeholders, (*path, number)) for number, piece in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: received(graph, piece, placeholders, (*path, key)) for key, piece in value.items()}
    return value
