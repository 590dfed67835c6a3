"""The models that `bench training` trains: four that stress different parts of a step.

mlp          784-2048-2048-10: 5.8 million parameters and little arithmetic, so the exchange dominates
cnn          two convolutions, 0.2 million parameters: arithmetic dominates
embedding    a million rows of 16; a batch touches a few hundred: sparse gradients
transformer  four layers of width 256: 3.2 million parameters, and arithmetic to match

All are trained by plain SGD. At its learning rate the loss falls and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Workload(NamedTuple):
    """A model, its batches, and how it learns. `batch(n)` are n samples: random inputs and random classes."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    batch_size: int
    lr: float
    sparse: bool = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs), targets)


class BenchTransformer(nn.Module):
    """A causal transformer over 64 symbols: four layers of width 256 with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of the next symbol, shape (batch, symbols, length), for symbols of shape (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        scores: Tensor = self.head(self.layers(self.embed(inputs), mask=mask, is_causal=True))
        return scores.transpose(1, 2)


class Bag(nn.Module):
    """A million rows of 16 with sparse gradients; a sample is the sum of ten rows, and a linear layer scores it."""

    def __init__(self, rows: int = 1_000_000) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(rows, 16, mode="sum", sparse=True)
        self.head = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of shape (batch, 10), for row numbers of shape (batch, 10)."""
        scores: Tensor = self.head(self.rows(inputs))
        return scores


def mlp() -> nn.Module:
    """784-2048-2048-10, ReLU between."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def cnn() -> nn.Module:
    """Two convolutions and two linear layers on 28 × 28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def _vectors(*shape: int) -> Callable[[int], Batch]:
    return lambda count: (torch.randn(count, *shape), torch.randint(10, (count,)))


MODELS: dict[str, Workload] = {
    "mlp": Workload(mlp, _vectors(784), 64, 0.01),
    "cnn": Workload(cnn, _vectors(1, 28, 28), 64, 0.01),
    "embedding": Workload(
        Bag, lambda count: (torch.randint(1_000_000, (count, 10)), torch.randint(10, (count,))), 64, 0.1, sparse=True
    ),
    "transformer": Workload(
        BenchTransformer, lambda count: (torch.randint(64, (count, 64)), torch.randint(64, (count, 64))), 8, 0.01
    ),
}
