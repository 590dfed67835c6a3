"""What split layers send in a step, worked out from shapes: to the byte, whether sizes divide evenly or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from polytempo.partition.tensor.attention import SplitAttention
from polytempo.partition.tensor.convolution import ColumnConvolution, RowConvolution
from polytempo.partition.tensor.embedding import ColumnEmbedding, RowEmbedding
from polytempo.partition.tensor.layer import SplitLayer
from polytempo.partition.tensor.linear import ColumnLinear, RowLinear
from polytempo.partition.tensor.sequence import ScatterLayer, SequenceLayer
from polytempo.partition.tensor.split_model import SplitModel


class LayerTraffic(NamedTuple):
    """Bytes of all ranks of a model together."""

    forward_bytes: int
    backward_bytes: int


def layer_traffic(layer: SplitLayer, positions: int, itemsize: int) -> LayerTraffic:
    """What one layer sends for so many positions (samples times their length), of numbers of `itemsize` bytes.

    With N ranks, P positions and I inputs, O outputs, in units of (N-1) · itemsize bytes:

    | layer | forward | backward | with `sequence`: forward | backward |
    |---|---|---|---|---|
    | column | (P·O if it gathers) | 2·P·I | P·I | P·I |
    | row | 2·P·O | 0 | P·O | P·O (+ 2·O for a bias) |
    | rows of an embedding | 2·P·O | 0 | P·O | P·O |
    | columns of an embedding | P·O | 0 | P·O | P·O |
    | heads, of one tensor | 2·P·O | 2·P·I | P·(I+O) | P·(I+O) (+ 2·O for a bias) |
    | norms and others by position | 0 | 0 | 0 | 2 · parameters |
    | scatter | | | 0 | P·O |

    It holds for layers whose input needs a gradient, for row layers that take parts, for attention without weights.
    """
    forward, backward = _numbers(layer, positions)
    each = (layer.group.size - 1) * itemsize
    return LayerTraffic(forward * each, backward * each)


def _numbers(layer: SplitLayer, positions: int) -> tuple[int, int]:
    sequence = layer.group.sequence
    match layer:
        case ColumnLinear():
            inputs, gathered = positions * layer.in_features, positions * layer.out_features * layer.gathers
            return (inputs + gathered, inputs) if sequence else (gathered, 2 * inputs)
        case RowLinear():
            outputs, bias = positions * layer.out_features, 0 if layer.bias is None else layer.out_features
            return (outputs, outputs + 2 * bias) if sequence else (2 * outputs, 0)
        case RowEmbedding():
            outputs = positions * layer.embedding_dim
            return (outputs, outputs) if sequence else (2 * outputs, 0)
        case ColumnEmbedding():
            outputs = positions * layer.embedding_dim
            return outputs, outputs * sequence
        case SplitAttention():
            inputs = positions * layer.embed_dim
            forward, backward = _numbers(layer.out_proj, positions)
            return (forward + inputs, backward + inputs) if sequence else (forward, backward + 2 * inputs)
        case ColumnConvolution() | RowConvolution():
            raise ValueError(
                "what a convolution sends depends on the size of its images, not on positions; a layer's inputs and "
                "outputs are what partition.plan.volumes counts"
            )
        case SequenceLayer():
            return 0, 2 * sum(p.numel() for p in layer.parameters())
        case ScatterLayer():
            return 0, positions * _features(layer.whole)
    return 0, 0


def _features(layer: nn.Module) -> int:
    match layer:
        case nn.Embedding():
            return layer.embedding_dim
        case nn.Linear():
            return layer.out_features
        case nn.LayerNorm():
            return layer.normalized_shape[-1]
    raise TypeError(f"{type(layer).__name__} is not scattered")


def loss_traffic(num_ranks: int, positions: int, itemsize: int, *, smooths: bool = False) -> int:
    """Bytes of `split_cross_entropy`: each rank sends three numbers of a position to each other one, or four."""
    return num_ranks * (num_ranks - 1) * (3 + smooths) * positions * itemsize


def model_traffic(
    model: SplitModel, positions: int, itemsize: int, other: Mapping[str, int] | None = None
) -> dict[str, LayerTraffic]:
    """`layer_traffic` of every split layer, by name. `other`: how many positions layers see that see others."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SplitLayer)}
    outer = {n: m for n, m in layers.items() if not any(n.startswith(f"{o}.") for o in layers)}
    counts = other or {}
    return {name: layer_traffic(layer, counts.get(name, positions), itemsize) for name, layer in outer.items()}
