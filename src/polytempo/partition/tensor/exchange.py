"""Exchanges between split layers, with their gradients. Each backward pass is the adjoint of its forward pass:

| | forward | backward | of |
|---|---|---|---|
| `copied` | nothing | sum | a tensor that all ranks hold and use differently |
| `shared` | nothing | sum, as it is | a parameter that all ranks hold and use differently |
| `summed` | sum | nothing | partial sums; all ranks want the whole |
| `gathered` | gather | own part | parts that all ranks want as a whole, to compute the same with it |
| `scattered` | own part | gather | a whole; each rank goes on with a part |
| `gathered_to_split` | gather | reduce | parts that all ranks want as a whole, to compute different things with it |
| `reduced` | reduce | gather | partial sums; each rank wants a part |

All but `shared` go by the codecs of the group (`model_group`). `spatial.halos` has the exchange of halos of pictures.
Between layers there are whole tensors on all ranks, or, with `sequence`, each rank's part of the positions:

    whole       x ── copied ──▶ column ──▶ row ── summed ──▶ norm, dropout, +
    sequence    x ── gathered ─▶ column ──▶ row ── reduced ─▶ norm, dropout, +      each on its own positions

Both send the same bytes; with `sequence` layers between are computed once and kept once over all ranks together.
Positions are the last dimension but one: shape (…, positions, features).

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

from polytempo.partition.tensor.division import even_sizes
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.wires import AS_THEY_ARE, Wires

Map = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """A linear map and its adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.adjoint = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear_pair(group: ModelGroup, tensor: Tensor, forward: Map, backward: Map) -> Tensor:
    """A linear map of this rank's tensor, and its adjoint for the gradient."""
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


def _reduce(
    group: ModelGroup, sizes: Sequence[int], dim: int, partial_sum: Tensor, wires: Wires | None = None
) -> Tensor:
    return group.reduce(partial_sum, sizes, dim, wires)


def copied(group: ModelGroup, tensor: Tensor) -> Tensor:
    """See the table above."""
    return tensor if group.size == 1 else linear_pair(group, tensor, _same, group.total)


def shared(group: ModelGroup, parameter: Tensor) -> Tensor:
    """See the table above."""
    return (
        parameter if group.size == 1 else linear_pair(group, parameter, _same, partial(group.total, wires=AS_THEY_ARE))
    )


def shared_together(group: ModelGroup, *parameters: Tensor | None) -> list[Tensor | None]:
    """`shared` of several parameters, in one exchange of their gradients."""
    learns = [p for p in parameters if p is not None and p.requires_grad]
    if group.size == 1 or len(learns) < 2 or len({(p.dtype, p.device) for p in learns}) > 1:
        return [p if p is None or not p.requires_grad else shared(group, p) for p in parameters]
    flat = shared(group, torch.cat([p.reshape(-1) for p in learns])).split([p.numel() for p in learns])
    found = {id(p): each.view(p.shape) for p, each in zip(learns, flat, strict=True)}
    return [p if p is None else found.get(id(p), p) for p in parameters]


def summed(group: ModelGroup, tensor: Tensor) -> Tensor:
    """See the table above."""
    return tensor if group.size == 1 else linear_pair(group, tensor, group.total, _same)


def gathered(group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int, wires: Wires | None = None) -> Tensor:
    """See the table above. `wires`: by these codecs."""
    return _with_sizes(group, tensor, sizes, dim, partial(_gather, wires=wires), _own)


def scattered(group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """See the table above."""
    return _with_sizes(group, tensor, sizes, dim, _own, _gather)


def gathered_to_split(
    group: ModelGroup, tensor: Tensor, sizes: Sequence[int], dim: int, wires: Wires | None = None
) -> Tensor:
    """See the table above. `wires`: by these codecs."""
    return _with_sizes(group, tensor, sizes, dim, partial(_gather, wires=wires), partial(_reduce, wires=wires))


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
    return linear_pair(group, tensor, partial(forward, group, sizes, at), partial(backward, group, sizes, at))


POSITIONS = -2
"""The dimension of positions in tensors between layers."""


def entered(group: ModelGroup, tensor: Tensor) -> Tensor:
    """The whole tensor, for a layer with a part on each rank."""
    if not group.sequence or group.size == 1:
        return copied(group, tensor)
    check_positions(group, tensor)
    return gathered_to_split(group, tensor, group.positions, POSITIONS)


def left(group: ModelGroup, partial: Tensor) -> Tensor:
    """The sum of the ranks' results, for the next layer."""
    if not group.sequence or group.size == 1:
        return summed(group, partial)
    return reduced(group, partial, _divide(group, partial), POSITIONS)


def passed(group: ModelGroup, whole: Tensor) -> Tensor:
    """A whole tensor that all ranks have computed, for the next layer."""
    if not group.sequence or group.size == 1:
        return whole
    return scattered(group, whole, _divide(group, whole), POSITIONS)


def own_parameter(group: ModelGroup, parameter: Tensor) -> Tensor:
    """A parameter that all ranks hold and use on their positions: its gradient is the sum over all positions."""
    return shared(group, parameter) if group.sequence else parameter


def check_positions(group: ModelGroup, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not this rank's part of the sequence."""
    if group.size == 1:
        return
    found = tensor.shape[POSITIONS] if tensor.dim() > 1 else None
    expected = group.positions[group.rank] if group.positions else None
    if found != expected:
        raise ValueError(
            f"with sequence=True rank {group.rank} of the model has {expected} positions, in the last dimension but "
            f'one, and a layer got a tensor of shape {tuple(tensor.shape)}; let the layer before be "scatter", "row" '
            'or "embedding"'
        )


def _divide(group: ModelGroup, whole: Tensor) -> tuple[int, ...]:
    if whole.dim() < 2:
        raise ValueError(f"with sequence=True tensors are (…, positions, features); got shape {tuple(whole.shape)}")
    group.positions = even_sizes(whole.shape[POSITIONS], group.size, what="positions")
    return group.positions
