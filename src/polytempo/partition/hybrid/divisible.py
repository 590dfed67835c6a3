"""Which layers can be divided by their output features while every rank sees samples of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from polytempo.partition.tensor.embedding import check_embedding

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer's output from its input, weight and bias."""


class Divisible(NamedTuple):
    """How a layer is divided."""

    compute: Compute
    features: int
    """How many outputs there are to divide."""
    weight_dim: int
    """The dimension of the weight that the outputs are."""
    output_dim: int
    """The dimension of the output that they are, counted from its end."""


def divisible(module: nn.Module) -> Divisible:
    """How this layer is divided. ValueError, with the reason, for one that cannot be."""
    if is_parametrized(module) or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError("it has hooks or parametrizations, which would be lost; divide the model before they are set")
    if type(module) is nn.Linear:
        return Divisible(functional.linear, module.out_features, 0, -1)
    if type(module) is nn.Embedding:
        check_embedding("it", module)
        table = partial(_rows, padding_idx=module.padding_idx)
        return Divisible(table, module.embedding_dim, 1, -1)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and type(module) in _CONVOLUTIONS:
        if module.groups > 1 or module.padding_mode != "zeros":
            raise ValueError(
                f"it has groups={module.groups} and padding_mode={module.padding_mode!r}; only convolutions of one "
                'group and padding_mode="zeros" can be divided'
            )
        options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        compute = partial(_CONVOLUTIONS[type(module)], **options)
        return Divisible(compute, module.out_channels, 0, -len(module.kernel_size) - 1)
    raise ValueError(f"{type(module).__name__} is none of Linear, Embedding, Conv1d, Conv2d and Conv3d")


def divisible_features(module: nn.Module) -> int:
    """How many outputs of this layer can be divided; 0 where it cannot be."""
    try:
        return divisible(module).features
    except ValueError:
        return 0


def _rows(indices: Tensor, table: Tensor, bias: Tensor | None, *, padding_idx: int | None) -> Tensor:
    return functional.embedding(indices, table, padding_idx)


_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
"""By exact class: a subclass may compute something else."""
