"""The split layer that takes a module's place, by the way that is asked for and the module's class."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from polytempo.partition.tensor.division import Division, even_sizes
from polytempo.partition.tensor.exchange import POSITIONS
from polytempo.partition.tensor.layers.attention import SplitAttention
from polytempo.partition.tensor.layers.convolution import CONVOLUTIONS, ColumnConvolution, Convolution, RowConvolution
from polytempo.partition.tensor.layers.dropout import SplitDropout
from polytempo.partition.tensor.layers.layer import Cutter, ScatterLayer, SequenceLayer, check_plain
from polytempo.partition.tensor.layers.linear import (
    ColumnEmbedding,
    ColumnLinear,
    RowEmbedding,
    RowLinear,
    VocabularyLinear,
)
from polytempo.partition.tensor.spatial.areas import grid_of
from polytempo.partition.tensor.spatial.own_weights import with_own_weights
from polytempo.partition.tensor.spatial.spatial_layer import SpatialLayer
from polytempo.partition.tensor.way import Way

_HEADS_DIM = -3
"""The dimension of heads in attention weights (batch, heads, queries, keys)."""

Build = Callable[[Cutter, str, nn.Module, Way], nn.Module]


def built(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    """The split layer in place of `module`. ValueError where it cannot be split so."""
    if way.kind == "places":
        return _places(cutter, name, module, way)
    ways = {kind: build for (kind, of), build in _BUILDS.items() if type(module) is of}
    if not ways or way.kind not in ways:
        known = ", ".join(sorted(ways)) or "none"
        raise ValueError(f"{name} is a {type(module).__name__}, which cannot be split by {way}; its ways are: {known}")
    check_plain(name, module)
    try:
        return ways[way.kind](cutter, name, module, way)
    except ValueError as error:
        raise ValueError(f"{name} cannot be split by {way}: {error}") from None


def _parts(cutter: Cutter, total: int, way: Way, dim: int, what: str = "features") -> Division:
    """`total` indices in `packed` blocks, each of so many heads."""
    block, over = divmod(total, way.packed)
    if over:
        raise ValueError(f"{total} {what} cannot be {way.packed} equal blocks")
    if way.heads is not None and (way.heads < 1 or block % way.heads):
        raise ValueError(f"{block} {what} cannot be {way.heads} equal heads")
    unit = 1 if way.heads is None else block // way.heads
    return Division(dim, even_sizes(block, cutter.group.size, unit, what), way.packed)


def _along(make: Callable[..., nn.Module], total: str, dim: int, what: str = "features") -> Build:
    """Cut as many indices as the module's attribute `total` says, along `dim` of its weight."""

    def build(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
        return make(cutter, name, module, _parts(cutter, getattr(module, total), way, dim, what))

    return build


def _column_linear(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    assert isinstance(module, nn.Linear)
    if way.gather and way.packed > 1:
        raise ValueError(
            "gather=True puts the parts in a row, which is another order than packed blocks; leave one out"
        )
    return ColumnLinear(cutter, name, module, _parts(cutter, module.out_features, way, 0), gathers=way.gather)


def _column_convolution(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    assert isinstance(module, Convolution)
    _check_convolution(cutter, way)
    outputs = _parts(cutter, module.out_channels, way, 0, "channels")
    return ColumnConvolution(cutter, name, module, outputs, gathers=way.gather)


def _row_convolution(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    assert isinstance(module, Convolution)
    _check_convolution(cutter, way)
    return RowConvolution(cutter, name, module, _parts(cutter, module.in_channels, way, 1, "channels"))


def _check_convolution(cutter: Cutter, way: Way) -> None:
    if cutter.group.sequence:
        raise ValueError("tensors between convolutions have no positions; leave out sequence=True")
    if way.packed > 1:
        raise ValueError("channels are one block; leave out packed")


def _attention(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    assert isinstance(module, nn.MultiheadAttention)
    return SplitAttention(cutter, name, module)


def _dropout(dim: int) -> Build:
    def build(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
        assert isinstance(module, nn.Dropout)
        return SplitDropout(cutter.group, module.p, dim)

    return build


def _sequence(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    return SequenceLayer(cutter.group, module)


def _scatter(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    return ScatterLayer(cutter.group, module)


def _places(cutter: Cutter, name: str, module: nn.Module, way: Way) -> nn.Module:
    if cutter.group.sequence:
        raise ValueError(f"{name} is split by {way}, and pictures have no positions; leave out sequence=True")
    try:
        own = with_own_weights(cutter, name, module, grid_of(cutter.group.size, way.rows, way.columns))
        return SpatialLayer(cutter.group, own, way)
    except ValueError as error:
        raise ValueError(f"{name} cannot be split by {way}: {error}") from None


_BUILDS: dict[tuple[str, type[nn.Module]], Build] = {
    ("column", nn.Linear): _column_linear,
    ("vocabulary", nn.Linear): _along(VocabularyLinear, "out_features", 0, "classes"),
    ("row", nn.Linear): _along(RowLinear, "in_features", 1),
    **{("column", of): _column_convolution for of in CONVOLUTIONS},
    **{("row", of): _row_convolution for of in CONVOLUTIONS},
    ("embedding", nn.Embedding): _along(RowEmbedding, "num_embeddings", 0, "rows"),
    ("vocabulary", nn.Embedding): _along(RowEmbedding, "num_embeddings", 0, "rows"),
    ("column", nn.Embedding): _along(ColumnEmbedding, "embedding_dim", 1),
    ("heads", nn.MultiheadAttention): _attention,
    ("column", nn.Dropout): _dropout(-1),
    ("heads", nn.Dropout): _dropout(_HEADS_DIM),
    ("sequence", nn.Dropout): _dropout(POSITIONS),
    ("sequence", nn.LayerNorm): _sequence,
    ("sequence", nn.RMSNorm): _sequence,
    ("sequence", nn.Linear): _sequence,
    ("scatter", nn.Embedding): _scatter,
    ("scatter", nn.Linear): _scatter,
    ("scatter", nn.LayerNorm): _scatter,
}
"""Split layers by exact class: a subclass may compute something else."""
