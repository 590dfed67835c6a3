"""Embeddings of which each rank holds some rows (of the vocabulary) or some features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.exchange import gathered
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer
from polytempo.partition.tensor.stream import left, passed


def check_embedding(name: str, whole: nn.Embedding) -> None:
    """Raise ValueError for options that need the whole table."""
    used = [f"{o}={getattr(whole, o)}" for o in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(whole, o)]
    if used:
        raise ValueError(f"{name} is an embedding with {', '.join(used)}, which a split one has not; leave that out")


class RowEmbedding(SplitLayer):
    """Some rows of the table: a rank answers zero for the others', and the answers are summed.

    Cost of N ranks, for P positions: forward a sum of P · features; with `sequence` a reduction, and backward a gather.
    """

    def __init__(self, cutter: Cutter, name: str, whole: nn.Embedding, rows: Division) -> None:
        super().__init__(cutter.group, {"weight": rows})
        check_embedding(name, whole)
        self.num_embeddings, self.embedding_dim, self.rows = whole.num_embeddings, whole.embedding_dim, rows
        self.padding_idx = whole.padding_idx
        self.weight = cutter.cut(f"{name}.weight", whole.weight, rows)

    def forward(self, indices: Tensor) -> Tensor:
        """(…) to (…, features)."""
        if not indices.is_meta and bool(((indices < 0) | (indices >= self.num_embeddings)).any()):
            low, high = int(indices.min()), int(indices.max())
            raise IndexError(f"an embedding of {self.num_embeddings} rows got indices from {low} to {high}")
        begin, end = self.rows.spans()[self.group.rank]
        others = (indices < begin) | (indices >= end)
        rows = functional.embedding((indices - begin).masked_fill(others, 0), self.weight)
        if self.padding_idx is not None:  # its row gets no gradient
            rows = torch.where((indices == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        own = rows.masked_fill(others.unsqueeze(-1), 0.0)
        return left(self.group, own)


class ColumnEmbedding(SplitLayer):
    """Some features of each row; all ranks get all of them. Cost, for P positions: forward a gather of P · features."""

    def __init__(self, cutter: Cutter, name: str, whole: nn.Embedding, features: Division) -> None:
        super().__init__(cutter.group, {"weight": features})
        check_embedding(name, whole)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.features = whole.padding_idx, features
        self.weight = cutter.cut(f"{name}.weight", whole.weight, features)

    def forward(self, indices: Tensor) -> Tensor:
        """(…) to (…, features)."""
        own = functional.embedding(indices, self.weight, self.padding_idx)
        return passed(self.group, gathered(self.group, own, self.features.sizes, -1))
