"""Which layer follows which, with nothing between them but functions of single features, so that they can be a pair."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional

from polytempo.partition.tensor.layers.convolution import CONVOLUTIONS

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
    """The layer that gets what another one makes, feature by feature."""

    name: str
    dropouts: tuple[str, ...] = ()
    """Dropouts on the way, which must be split like the features."""
    heads: int | None = None
    """Channels that are flattened on the way, so that each is several of the follower's features."""


def followers(model: nn.Module, graph: fx.Graph) -> dict[str, Follower]:
    """By the name of a linear layer or convolution: the one behind it, which alone gets its outputs."""
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
