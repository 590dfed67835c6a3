"""What split layers exchange, with its gradient. Each exchange's backward pass is the adjoint of its forward pass:

| | forward | backward | of |
|---|---|---|---|
| `copied` | nothing | sum | what all ranks hold and compute different things with |
| `shared` | nothing | sum, as it is | parameters of which the same holds |
| `summed` | sum | nothing | partial sums, of which all ranks want the whole |
| `gathered` | gather | own part | parts that all ranks want as a whole, to compute the same with it |
| `scattered` | own part | gather | a whole of which each rank goes on with a part |
| `gathered_to_split` | gather | reduce | parts that all ranks want as a whole, to compute different things with it |
| `reduced` | reduce | gather | partial sums, of which each rank wants a part |

All but `shared` go by the codecs of the group (`model_group`).

Source: the conjugate operators f and g of M. Shoeybi et al., "Megatron-LM", 2019 (`copied` and `summed`), and of V.
Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022 (the last two).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.wires import AS_THEY_ARE, Wires

_Map = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """A linear map and its adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: _Map, backward: _Map) -> Tensor:
        ctx.adjoint = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def _pair(group: ModelGroup, tensor: Tensor, forward: _Map, backward: _Map) -> Tensor:
    layer, occasion = group.layer, group.next_occasion()

    def adjoint(gradient: Tensor) -> Tensor:
        with group.of_layer(layer, backward=occasion):
            return backward(gradient)

    answer: Tensor = _Pair.apply(tensor, forward, adjoint)  # type: ignore[no-untyped-call]
    return answer


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _own(group: ModelGroup, sizes: Sequence[int], dim: int, whole: Tensor) -> Tensor:
    return whole.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank]).contiguous()


def _gather(group: ModelGroup, sizes: Sequence[int], dim: int, part: Tensor, wires: Wires | None = None) -> Tensor:
    return group.gather(part, sizes, dim, wires)


def _reduce(group: ModelGroup, sizes: Sequence[int], dim: int, partial_sum: Tensor) -> Tensor:
    return group.reduce(partial_sum, sizes, dim)


def copied(group: ModelGroup, tensor: Tensor) -> Tensor:
    """See the table above."""
    return tensor if group.size == 1 else _pair(group, tensor, _same, group.total)


def shared(group: ModelGroup, parameter: Tensor) -> Tensor:
    """See the table above."""
    return parameter if group.size == 1 else _pair(group, parameter, _same, partial(group.total, wires=AS_THEY_ARE))


def summed(group: ModelGroup, tensor: Tensor) -> Tensor:
    """See the table above."""
    return tensor if group.size == 1 else _pair(group, tensor, group.total, _same)


def gathered(group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int, wires: Wires | None = None) -> Tensor:
    """See the table above. `wires`: by these codecs."""
    return _with_sizes(group, tensor, sizes, dim, partial(_gather, wires=wires), _own)


def scattered(group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """See the table above."""
    return _with_sizes(group, tensor, sizes, dim, _own, _gather)


def gathered_to_split(group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """See the table above."""
    return _with_sizes(group, tensor, sizes, dim, _gather, _reduce)


def reduced(group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """See the table above."""
    return _with_sizes(group, tensor, sizes, dim, _reduce, _gather)


def _with_sizes(
    group: ModelGroup,
    tensor: Tensor,
    sizes: Sequence[int],
    dim: int,
    forward: Callable[[ModelGroup, Sequence[int], int, Tensor], Tensor],
    backward: Callable[[ModelGroup, Sequence[int], int, Tensor], Tensor],
) -> Tensor:
    if group.size == 1:
        return tensor
    at = dim % tensor.dim()
    return _pair(group, tensor, partial(forward, group, sizes, at), partial(backward, group, sizes, at))
