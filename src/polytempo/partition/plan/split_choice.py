"""`SplitPlan`: each layer of a model split over N ranks by the way that sends the fewest bytes.

    column ──▶ functions of single features ──▶ row        2·P·O forward, 2·P·I backward, nothing between
    column(gather=True)                                    P·O forward, 2·P·I backward
    row, which is given all inputs                         2·P·O forward, P·I backward

Numbers are in units of (N-1), all ranks together, for P positions. The model's graph tells which layers follow each
other with functions of single features between them (`partition.graph.trace`). The best pairs in a run of such layers
are found by dynamic programming. Attention goes by heads, an embedding by its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional

from polytempo.partition.graph.trace import Untraceable, inputs_of, trace
from polytempo.partition.plan.volume import LayerVolume, volumes
from polytempo.partition.tensor.layers.convolution import CONVOLUTIONS
from polytempo.partition.tensor.way import Way, column, row, way_of
from polytempo.partition.wires import AS_THEY_ARE, WAYS, Wires
from polytempo.partition.wires import Way as Passing

_LONG, _FLOAT32 = 2**20, 4


class SplitLayerPlan(NamedTuple):
    """One layer, and its traffic in units of (N-1) numbers of a sample. Without a way it stays whole."""

    volume: LayerVolume
    way: Way | None
    forward: float
    backward: float
    rounds: int
    """All-to-alls in a step: two make a sum, one a gather."""

    @property
    def numbers(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


_Weigh = Callable[[SplitLayerPlan], float]


@dataclass(frozen=True)
class SplitPlan:
    """The layers of a model, in the order of its calls, each with its way on so many ranks."""

    layers: tuple[SplitLayerPlan, ...]
    also: Mapping[str, Way]
    """Dropouts between a column and a row layer."""
    ranks: int
    wires: Wires = AS_THEY_ARE
    """The codecs of the layers' exchanges."""

    @property
    def rules(self) -> dict[str, Way]:
        """Ways by name; `pt.split` takes them."""
        return {each.volume.name: each.way for each in self.layers if each.way is not None} | dict(self.also)

    def bytes_of(self, layer: SplitLayerPlan, batch_size: int) -> float:
        """Bytes of all ranks together for a layer in a step, forward and backward."""
        return sum(self.passing_bytes(layer, way, batch_size) for way in WAYS)

    def passing_bytes(self, layer: SplitLayerPlan, way: Passing, batch_size: int) -> float:
        """Bytes of one way; by codecs about, as if each rank made one wire of its share."""
        numbers = getattr(layer, way) * batch_size
        return (self.ranks - 1) * self.wires.shared_bytes(way, numbers, layer.volume.itemsize, self.ranks)

    def seconds_of(self, layer: SplitLayerPlan, batch_size: int, latency_s: float, bytes_per_s: float) -> float:
        """Seconds of a layer's exchanges in a step, each rank on a link of its own."""
        return layer.rounds * latency_s + self.bytes_of(layer, batch_size) / self.ranks / bytes_per_s

    def saved_s(self, layer: SplitLayerPlan, batch_size: int, flops_per_s: float) -> float:
        """Seconds of computing that a rank leaves to the others in a step."""
        part = 0.0 if layer.way is None else 1 - 1 / self.ranks
        return part * layer.volume.flops * batch_size / flops_per_s

    def slower(self, batch_size: int, *, latency_s: float, bytes_per_s: float, flops_per_s: float) -> str:
        """A warning where exchanges take longer than the computing that they save; "" where they do not."""
        takes = [self.seconds_of(each, batch_size, latency_s, bytes_per_s) for each in self.layers]
        saves = [self.saved_s(each, batch_size, flops_per_s) for each in self.layers]
        if sum(takes) <= sum(saves) or not self.rules:
            return ""
        worst = max(range(len(takes)), key=lambda number: takes[number] - saves[number])
        return (
            f"on this link the split makes a step slower: exchanges take {1e3 * sum(takes):.3g} ms, and each worker "
            f"computes {1e3 * sum(saves):.3g} ms less; most of it is layer {self.layers[worst].volume.name}, "
            f"{1e3 * takes[worst]:.3g} ms against {1e3 * saves[worst]:.3g} ms. It still divides the memory by "
            f"{self.ranks}"
        )


def split_plan(model: nn.Module, sample: Any, ranks: int, wires: Wires = AS_THEY_ARE) -> SplitPlan:
    """The plan of every layer of `model` that can be split over `ranks`. Nothing is computed.

    `sample`: the model's inputs. `wires`: the codecs of the layers' exchanges. With them numbers take other bytes
    forward than backward; long tensors are assumed, for a plan is for any batch. Layers with fewer features, channels
    or heads than ranks stay whole, and so do layers that share weights, or that the model does not call.

    Errors: ValueError for a model that cannot be traced, which names the line, and the errors of `volumes`.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be at least 1")
    try:
        graph = trace(model, inputs_of(model, sample)).graph
    except Untraceable as error:
        raise ValueError(
            f"ways cannot be chosen without the order of the layers: {error}; or give rules by name, "
            'such as {"*.up": "column", "*.down": "row"}'
        ) from error
    found = {each.name: each for each in volumes(model, sample)}
    modules = {name: model.get_submodule(name) for name in found}
    able = {name for name, volume in found.items() if _able(modules[name], volume, ranks)}
    links = {
        first: link
        for first, link in followers(model, graph).items()
        if {first, link.name} <= able and found[first].features >= ranks
    }
    chosen: dict[str, SplitLayerPlan] = {name: SplitLayerPlan(volume, None, 0, 0, 0) for name, volume in found.items()}
    also: dict[str, Way] = {}
    for run in _runs(able, links):
        for plan in _best(run, links, found, modules, ranks, partial(_weight, wires)):
            chosen[plan.volume.name] = plan
            if plan.way == column() and plan.volume.name in links:
                also |= dict.fromkeys(links[plan.volume.name].dropouts, way_of("column"))
    return SplitPlan(tuple(chosen.values()), also, ranks, wires)


def given_plan(model: nn.Module, sample: Any, ways: Mapping[str, Way], ranks: int) -> SplitPlan:
    """The traffic of layers that are split by these ways over `ranks`. A row layer is taken to be given parts.

    Errors: as `volumes`.
    """
    found = [_as_given(each, ways.get(each.name)) for each in volumes(model, sample)]
    named = {each.volume.name for each in found}
    return SplitPlan(tuple(found), {name: way for name, way in ways.items() if name not in named}, ranks)


def _as_given(volume: LayerVolume, way: Way | None) -> SplitLayerPlan:
    """Count as `partition.tensor.traffic`; with `sequence` sums are two halves, before and behind."""
    given, made, learns = volume.inputs * volume.gradient, volume.outputs, int(volume.gradient)
    embeds = volume.kind == "embedding"
    match way:
        case Way(kind="heads"):
            return SplitLayerPlan(volume, way, 2 * made, 2 * given, 2 + 2 * learns)
        case Way(kind="row" | "embedding"):
            return SplitLayerPlan(volume, way, 2 * made, 0, 2)
        case Way(kind="column" | "vocabulary") if embeds:
            return SplitLayerPlan(volume, way, made, 0, 1)
        case Way(kind="column" | "vocabulary"):
            return SplitLayerPlan(volume, way, made * way.gather, 2 * given, way.gather + 2 * learns)
        case _:
            return SplitLayerPlan(volume, None, 0, 0, 0)


def _able(module: nn.Module, volume: LayerVolume, ranks: int) -> bool:
    """True if the layer alone has a way."""
    if volume.tied or not (volume.inputs or volume.outputs) or ranks == 1:
        return False
    if type(module) is nn.MultiheadAttention:
        return module.num_heads >= ranks and module.bias_k is None and not module.add_zero_attn
    return bool(volume.features) and max(volume.features, _num_inputs(module)) >= ranks


def _num_inputs(module: nn.Module) -> int:
    """Features or channels that a row layer divides; an embedding has none."""
    return int(getattr(module, "in_features", getattr(module, "in_channels", 0)))


def _runs(able: set[str], links: Mapping[str, Follower]) -> Iterator[list[str]]:
    """Layers in rows, each followed by its successor; together all that are able."""
    behind = {link.name for link in links.values()}
    for first in sorted(able - behind):
        run = [first]
        while run[-1] in links:
            run.append(links[run[-1]].name)
        yield run


def _best(
    run: Sequence[str],
    links: Mapping[str, Follower],
    found: Mapping[str, LayerVolume],
    modules: Mapping[str, nn.Module],
    ranks: int,
    weight: _Weigh,
) -> list[SplitLayerPlan]:
    """The pairs and single layers of a run with the least weight of traffic."""
    best: list[list[SplitLayerPlan]] = [[]]
    for number, name in enumerate(run):
        options = [[*best[number], _alone(found[name], modules[name], ranks, weight)]]
        if number:
            options.append([*best[number - 1], *_pair(found[run[number - 1]], found[name], links[run[number - 1]])])
        best.append(min(options, key=lambda plans: sum(map(weight, plans))))
    return best[-1]


def _alone(volume: LayerVolume, module: nn.Module, ranks: int, weight: _Weigh) -> SplitLayerPlan:
    """The best way of a layer that is given the whole, and gives the whole."""
    given, made = volume.inputs * volume.gradient, volume.outputs
    if type(module) is nn.MultiheadAttention:
        return SplitLayerPlan(volume, way_of("heads"), 2 * made, 2 * made * volume.gradient, 2 + 2 * volume.gradient)
    if type(module) is nn.Embedding:
        return SplitLayerPlan(volume, way_of("column"), made, 0, 1)
    by_column = SplitLayerPlan(volume, column(gather=True), made, 2 * given, 1 + 2 * volume.gradient)
    by_row = SplitLayerPlan(volume, row(), 2 * made, given, 2 + volume.gradient)
    possible = [by_column] * (volume.features >= ranks) + [by_row] * (_num_inputs(module) >= ranks)
    return min(possible, key=weight)


def _weight(wires: Wires, plan: SplitLayerPlan) -> float:
    """Traffic of a layer for a sample, in float32's bytes, in units of (N-1)."""
    return sum(float(getattr(plan, way)) * wires.shared_bytes(way, _LONG, _FLOAT32, 1) / _LONG for way in WAYS)


def _pair(first: LayerVolume, second: LayerVolume, link: Follower) -> list[SplitLayerPlan]:
    return [
        SplitLayerPlan(first, column(), 0, 2 * first.inputs * first.gradient, 2 * first.gradient),
        SplitLayerPlan(second, row(heads=link.heads), 2 * second.outputs, 0, 2),
    ]


_SINGLE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Identity),
)
_SINGLE_FUNCTIONS = frozenset(
    {
        *(functional.relu, functional.gelu, functional.silu, functional.tanh, functional.sigmoid, functional.elu),
        *(functional.leaky_relu, functional.softplus, functional.mish, functional.hardswish, functional.relu6),
        *(torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.sin, torch.cos),
    }
)
_SINGLE_METHODS = frozenset({"relu", "tanh", "sigmoid", "square", "sin", "cos", "contiguous"})
_OF_CHANNELS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
)
_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules of torch that a graph has as one node, with two linear layers, a function and a dropout between them."""


class Follower(NamedTuple):
    """The layer that gets another layer's outputs, feature by feature."""

    name: str
    dropouts: tuple[str, ...] = ()
    """Dropouts on the way, which must be split like the features."""
    heads: int | None = None
    """Channels that are flattened on the way, so that each is several of the follower's features."""


def followers(model: nn.Module, graph: fx.Graph) -> dict[str, Follower]:
    """(linear layer or convolution) -> the only layer that gets its outputs."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    found: dict[str, Follower] = {}
    for name, nodes in calls.items():
        module = model.get_submodule(name)
        if len(nodes) == 1 and type(module) in (nn.Linear, *CONVOLUTIONS):
            link = _followed(model, nodes[0], module)
            if link is not None and all(len(calls[each]) == 1 for each in (link.name, *link.dropouts)):
                found[name] = link
    for name, module in model.named_modules():
        if type(module) in _BLOCKS and module.activation in _SINGLE_FUNCTIONS:
            within = f"{name}." if name else ""
            found[f"{within}linear1"] = Follower(f"{within}linear2", (f"{within}dropout",))
    return found


def _followed(model: nn.Module, node: fx.Node, first: nn.Module) -> Follower | None:
    dropouts: list[str] = []
    kind, heads = type(first), None
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        if node.op == "output" or node.all_input_nodes != [before]:
            return None
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(module) is kind:
            return Follower(str(node.target), tuple(dropouts), heads)
        if type(module) is nn.Dropout and kind is nn.Linear:
            dropouts.append(str(node.target))
        elif kind is not nn.Linear and _flattens(node, module):
            kind, heads = nn.Linear, int(first.out_channels)  # type: ignore[arg-type]
        elif not (_single(node, module) or (kind is not nn.Linear and type(module) in _OF_CHANNELS)):
            return None
    return None


def _single(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_module":
        return type(module) in _SINGLE_MODULES
    if node.op == "call_function":
        return node.target in _SINGLE_FUNCTIONS
    return node.op == "call_method" and node.target in _SINGLE_METHODS


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """`nn.Flatten()`, `x.flatten(1)` or `torch.flatten(x, 1)`: all of a sample, channels first."""
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    named = {"call_function": torch.flatten, "call_method": "flatten"}.get(node.op)
    given = (tuple(node.args[1:]), dict(node.kwargs))
    return node.target == named and given in (((1,), {}), ((), {"start_dim": 1}))
