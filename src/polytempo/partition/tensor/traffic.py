"""Bytes that split layers send in a step, computed from shapes: exact, whether sizes divide evenly or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import nn

from polytempo.partition.tensor.division import even_sizes
from polytempo.partition.tensor.layers.attention import SplitAttention
from polytempo.partition.tensor.layers.convolution import ColumnConvolution, Convolution, RowConvolution
from polytempo.partition.tensor.layers.layer import ScatterLayer, SequenceLayer, SplitLayer
from polytempo.partition.tensor.layers.linear import ColumnEmbedding, ColumnLinear, RowEmbedding, RowLinear
from polytempo.partition.tensor.layers.locally_connected import LocallyConnected2d
from polytempo.partition.tensor.spatial.areas import PictureGrid
from polytempo.partition.tensor.spatial.halos import halo_numbers
from polytempo.partition.tensor.spatial.spatial_layer import SpatialLayer
from polytempo.partition.tensor.spatial.windows import wanted, windows_of
from polytempo.partition.tensor.split_model import SplitModel
from polytempo.partition.wires import AS_THEY_ARE, Way, Wires, without_memory


class LayerTraffic(NamedTuple):
    """Bytes of all ranks of a model together."""

    forward_bytes: int
    backward_bytes: int


class _Exchange(NamedTuple):
    """A whole tensor that layers exchange in pieces, one of each rank."""

    way: Way
    pieces: tuple[int, ...]
    """Numbers of each piece."""
    rounds: int = 1
    """2 for a sum on all ranks."""
    wires: Wires | None = None
    """None: the model's."""


def layer_traffic(layer: SplitLayer, positions: int, itemsize: int, samples: int = 1) -> LayerTraffic:
    """Bytes of one layer for so many positions (samples times their length), with numbers of `itemsize` bytes.

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

    With codecs, the bytes of the pieces' wires replace `itemsize` bytes a number, but for parameters; then with
    `sequence` it counts that the positions are of so many `samples`, for their lengths are divided.

    It holds for layers with an input that needs a gradient, for row layers that take parts, for attention without
    weights.
    """
    size, sent = layer.group.size, {"forward": 0, "backward": 0}
    for way, pieces, rounds, wires in _exchanges(layer, positions, samples):
        likes = [without_memory(numbers, itemsize) for numbers in pieces]
        sent[way] += (size - 1) * rounds * (wires or layer.group.wires).common_bytes(way, likes)
    return LayerTraffic(sent["forward"], sent["backward"])


def _exchanges(layer: SplitLayer, positions: int, samples: int) -> list[_Exchange]:
    size = layer.group.size

    def stream(features: int, summed: Way) -> list[_Exchange]:
        """A tensor that enters or leaves, summed on the way `summed` without `sequence`."""
        if not layer.group.sequence:
            return [_Exchange(summed, _pieces(positions * features, size), 2)]
        whole = _by_position(positions, samples, size, features)
        return [_Exchange("forward", whole), _Exchange("backward", whole)]

    def parameters(numbers: int) -> list[_Exchange]:
        return [_Exchange("backward", (numbers,), 2, AS_THEY_ARE)] if layer.group.sequence else []

    def passed(features: int) -> list[_Exchange]:
        whole = _by_position(positions, samples, size, features) if layer.group.sequence else ()
        return [_Exchange("backward", whole)]

    match layer:
        case ColumnLinear():
            outputs = tuple(positions * each for each in layer.outputs.sizes) if layer.gathers else ()
            return [*stream(layer.in_features, "backward"), _Exchange("forward", outputs)]
        case RowLinear():
            return [
                *stream(layer.out_features, "forward"),
                *parameters(0 if layer.bias is None else layer.out_features),
            ]
        case RowEmbedding():
            return stream(layer.embedding_dim, "forward")
        case ColumnEmbedding():
            features = tuple(positions * each for each in layer.features.sizes)
            return [_Exchange("forward", features), *passed(layer.embedding_dim)]
        case SplitAttention():
            return [*stream(layer.embed_dim, "backward"), *_exchanges(layer.out_proj, positions, samples)]
        case ColumnConvolution() | RowConvolution() | SpatialLayer():
            raise ValueError(
                "a convolution's traffic depends on the size of its images, not on positions; partition.plan.volumes "
                "counts a layer's inputs and outputs, and convolution_traffic the halos of one by places"
            )
        case SequenceLayer():
            return parameters(sum(p.numel() for p in layer.parameters()))
        case ScatterLayer():
            return passed(_features(layer.whole))
    return []


def _pieces(numbers: int, size: int) -> tuple[int, ...]:
    """Sizes of a flat tensor's pieces, as `Tensor.tensor_split` cuts it."""
    each, more = divmod(numbers, size)
    return tuple(each + (rank < more) for rank in range(size))


def _by_position(positions: int, samples: int, size: int, features: int) -> tuple[int, ...]:
    return tuple(samples * each * features for each in even_sizes(positions // samples, size, what="positions"))


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


def convolution_traffic(
    layer: Convolution | LocallyConnected2d,
    sizes: Sequence[int],
    grid: tuple[int, ...],
    samples: int,
    itemsize: int,
    *,
    learns: bool = True,
) -> LayerTraffic:
    """Bytes of a convolution by places, of all ranks, on pictures of `sizes` (rows, columns) that are divided already.

    Forward the halos of its inputs; backward their gradients if `learns`, which the input of a network does not need,
    and the sum of the gradients of its parameters. With kernels of k × k places, stride 1, padding (k-1)/2, H × W
    places on R × C ranks, B samples and I channels:

        forward     B · I · [(R-1)·(k-1)·W + (C-1)·(k-1)·H + (R-1)·(C-1)·(k-1)²] · itemsize
        backward    as much, and 2 · (R·C - 1) · parameters · itemsize

    A locally connected layer sends the halos alone.

    Errors: ValueError for an output without a place for each rank: every rank then computes the whole.
    """
    windows = windows_of(layer)
    given = PictureGrid(tuple(sizes), grid)
    made = PictureGrid(tuple(window.outputs(size) for window, size in zip(windows, sizes, strict=True)), grid)
    if not (given.divide and made.divide):
        raise ValueError(f"pictures of {given.sizes} and {made.sizes} places are not divided by a grid of {grid} ranks")
    halo = samples * layer.in_channels * halo_numbers(given.areas, wanted(made, windows)) * itemsize
    own = isinstance(layer, LocallyConnected2d)
    parameters = 0 if own else sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return LayerTraffic(halo, halo * learns + 2 * (prod(grid) - 1) * parameters * itemsize)


def model_traffic(
    model: SplitModel, positions: int, itemsize: int, other: Mapping[str, int] | None = None, samples: int = 1
) -> dict[str, LayerTraffic]:
    """`layer_traffic` of every split layer, by name. `other`: positions of layers that see one sample's, such as an
    embedding of positions."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SplitLayer)}
    outer = {n: m for n, m in layers.items() if not any(n.startswith(f"{o}.") for o in layers)}
    seen = {name: (count, 1) for name, count in (other or {}).items()}
    found = {}
    for name, layer in outer.items():
        count, of = seen.get(name, (positions, samples))
        found[name] = layer_traffic(layer, count, itemsize, of)
    return found
