"""What of a value crosses a cut: tensors as they are, numbers as tensors of one element, constants not at all."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_CONSTANTS = (str, torch.dtype, torch.device, torch.layout, type(None), type(...))
Path = tuple[int | str, ...]


class Part(NamedTuple):
    """A piece of a node's value that crosses: where it stands in the value, and what it is there."""

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
        """Whether a gradient comes back."""
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
    """Whether there is a tensor in the value."""
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
    """The value again, out of what a stage was sent, as an argument of its graph."""
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
