"""Which layers can be divided by their output features while every rank sees samples of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from polytempo.partition.tensor.layers.convolution import CONVOLUTIONS, Convolution, channel_dim, convolve
from polytempo.partition.tensor.layers.linear import check_embedding

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
    if isinstance(module, Convolution) and type(module) in CONVOLUTIONS:
        return Divisible(convolve(module), module.out_channels, 0, channel_dim(module))
    raise ValueError(f"{type(module).__name__} is none of Linear, Embedding, Conv1d, Conv2d and Conv3d")


def divisible_features(module: nn.Module) -> int:
    """How many outputs of this layer can be divided; 0 where it cannot be."""
    try:
        return divisible(module).features
    except ValueError:
        return 0


def _rows(indices: Tensor, table: Tensor, bias: Tensor | None, *, padding_idx: int | None) -> Tensor:
    return functional.embedding(indices, table, padding_idx)
