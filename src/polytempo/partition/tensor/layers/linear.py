"""Linear layers and embeddings with a part on each rank.

    column     y_r = x · W_rᵀ + b_r            rank r has some of the outputs          x ──▶ [y_0 │ y_1]
    row        y = Σ_r x_r · W_rᵀ + b          rank r takes some of the inputs         [x_0 │ x_1] ──▶ y

A column layer followed by a row layer, with functions of single features between them, needs one sum forward (behind
the row layer) and one backward (before the column layer). torch stores a weight as (outputs, inputs). Of an embedding
each rank holds some rows (of the vocabulary) or some features.

Source: M. Shoeybi et al., "Megatron-LM", 2019; the split by outputs is model parallelism of J. Dean et al., 2012.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.exchange import entered, gathered, left, own_parameter, passed, scattered
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer


class ColumnLinear(SplitLayer):
    """Output features of a linear layer. With `gathers` all ranks get all of them, else each its own.

    Cost of N ranks, for P positions: backward a sum of P · inputs; `gathers`: forward a gather of P · outputs. With
    `sequence`, a gather of P · inputs forward and a reduction of as many backward instead of the sum.
    """

    def __init__(
        self, cutter: Cutter, name: str, whole: nn.Linear, outputs: Division, *, gathers: bool = False
    ) -> None:
        super().__init__(cutter.group, {"weight": outputs, "bias": outputs})
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.outputs, self.gathers = outputs, gathers
        self.weight = cutter.cut(f"{name}.weight", whole.weight, outputs)
        self.bias = cutter.cut_if_any(f"{name}.bias", whole.bias, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, inputs) to (…, this rank's outputs), or (…, outputs)."""
        own = functional.linear(entered(self.group, inputs), self.weight, self.bias)
        return gathered(self.group, own, self.outputs.sizes, -1) if self.gathers else own


class VocabularyLinear(ColumnLinear):
    """An output layer with logits that stay divided by class: see `split_cross_entropy`."""


class RowLinear(SplitLayer):
    """Input features of a linear layer. It takes this rank's inputs, or all of them and uses its own.

    Cost of N ranks, for P positions: forward a sum of P · outputs; where it takes all inputs, backward a gather of
    P · inputs. With `sequence`, a reduction of P · outputs forward and a gather of as many backward instead.
    """

    def __init__(self, cutter: Cutter, name: str, whole: nn.Linear, inputs: Division) -> None:
        super().__init__(cutter.group, {"weight": inputs})
        self.in_features, self.out_features, self.inputs = whole.in_features, whole.out_features, inputs
        self.weight = cutter.cut(f"{name}.weight", whole.weight, inputs)
        self.bias: nn.Parameter | None = whole.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, this rank's inputs) or (…, inputs) to (…, outputs)."""
        if inputs.shape[-1] == self.in_features:
            inputs = scattered(self.group, inputs, self.inputs.sizes, -1)
        own = self.inputs.sizes[self.group.rank]
        if inputs.shape[-1] != own:
            raise ValueError(
                f"rank {self.group.rank} has {own} of the {self.in_features} inputs of a row layer, and got "
                f"{inputs.shape[-1]}; let the column layer before it be split into the same sizes (the same heads)"
            )
        answer = left(self.group, functional.linear(inputs, self.weight))
        return answer if self.bias is None else answer + own_parameter(self.group, self.bias)


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
