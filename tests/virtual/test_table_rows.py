"""An embedding with sparse gradients: only rows travel, and the model becomes a dense gradient's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.collectives import halving_doubling, ring, tree
from polytempo.core import Strategy

WORDS = 300


class Bag(nn.Module):
    """Scores a bag of words; a bag that begins with word 0 is scored without the table."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, 4, mode="mean", sparse=sparse, dtype=torch.float64)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, words: Tensor) -> Tensor:
        """One number for each bag."""
        scored = words[words[:, 0] > 0]
        return self.bias + (self.table(scored).sum() if len(scored) else 0.0)


def job(words: Tensor, *, sparse: bool) -> pt.Job:
    """Plain SGD on squares."""
    return pt.Job(
        model=lambda: Bag(sparse=sparse),
        data=lambda path: pt.Data(TensorDataset(words), TensorDataset(words)),
        loss=pt.of_batch(lambda model, batch: ((model(batch[0]) - 1) ** 2).mean()),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.05,
        epochs=2,
    )


def bags(rows: int, *, without: slice = slice(0)) -> Tensor:
    """24 bags of 3 of the first `rows` words; the bags of `without` leave the table out."""
    words = torch.randint(1, rows, (24, 3), generator=torch.Generator().manual_seed(3))
    words[without, 0] = 0
    return words


@pytest.mark.parametrize(
    ("strategy", "workers", "words"),
    [
        (pt.strategies.sync_sgd(route=ring), 3, bags(WORDS)),
        (pt.strategies.sync_sgd(route=halving_doubling), 4, bags(WORDS, without=slice(0, 24, 2))),
        (pt.strategies.sync_sgd(route=tree), 2, bags(WORDS, without=slice(24))),
        (pt.strategies.sync_sgd(), 3, bags(5)),
    ],
    ids=["ring", "ranks-without", "all-without", "native"],
)
def test_rows_travel_and_the_model_is_that_of_dense_gradients(strategy: Strategy, workers: int, words: Tensor) -> None:
    found = [
        pt.simulate(job(words, sparse=sparse), strategy, workers, global_batch_size=2 * workers)
        for sparse in (True, False)
    ]
    rows, dense = found
    assert rows.loss is not None
    assert rows.loss == pytest.approx(dense.loss, rel=1e-12)
    assert 4 * rows.bytes_sent_per_rank < dense.bytes_sent_per_rank
