"""Contexts that keep a model's state while it is traced, and one graph of its two modes that reads the mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Set each module's mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Give each module afterwards the attributes that it had: values that `forward` keeps for later are forgotten."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def counts_unread(model: nn.Module) -> Iterator[None]:
    """Keep batch norms with momentum=None from reading the number of batches inside: a fake tensor has no value."""
    norms = [each for each in model.modules() if isinstance(each, _NormBase) and each.momentum is None]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


def read_flags(training: fx.Graph, evaluation: fx.Graph) -> bool:
    """Replace arguments that are the mode by a node that reads it. False where the graphs differ in something else."""
    nodes, others = list(training.nodes), list(evaluation.nodes)
    same = [(n.op, n.target) for n in nodes] == [(n.op, n.target) for n in others]
    if not same:
        return False
    place = {other: node for node, other in zip(nodes, others, strict=True)}
    changes: list[tuple[fx.Node, Any, Any]] = []
    for node, other in zip(nodes, others, strict=True):
        mapped = fx.node.map_arg((other.args, other.kwargs), lambda each: place[each])
        if not _alike((node.args, node.kwargs), mapped, allowed=(True, False)):
            return False
        if not _alike((node.args, node.kwargs), mapped):
            changes.append((node, (node.args, node.kwargs), mapped))
    for node, given, mapped in changes:
        path = list(node.meta.get("nn_module_stack", {}).values())
        with training.inserting_before(node):
            flag = training.get_attr(f"{path[-1][0]}.training" if path and path[-1][0] else "training")
        node.args, node.kwargs = _with_flag(given, mapped, flag)
    return True


def _alike(one: Any, other: Any, allowed: tuple[bool, bool] | None = None) -> bool:
    """True if arguments are equal, but for values that are `allowed[0]` in one and `allowed[1]` in the other."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_alike(a, b, allowed) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], allowed) for key in one)
    return (one is other or (type(one) is type(other) and one == other)) or (
        allowed is not None and one is allowed[0] and other is allowed[1]
    )


def _with_flag(one: Any, other: Any, flag: fx.Node) -> Any:
    if isinstance(one, tuple | list):
        return type(one)(_with_flag(a, b, flag) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return {key: _with_flag(one[key], other[key], flag) for key in one}
    return flag if one is True and other is False else one
