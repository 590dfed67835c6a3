"""Some entries of a large matrix, for matrix factorisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.data.scheduled.documents import scenes


class Ratings(NamedTuple):
    """Entry e stands in row `rows[e]` and column `columns[e]`."""

    rows: Tensor
    """(m,), int64."""
    columns: Tensor
    values: Tensor
    """(m,), float64."""
    num_rows: int
    num_columns: int


def drawn_ratings(
    rows: int = 1000, columns: int = 500, entries: int = 30_000, rank: int = 8, noise: float = 0.1, seed: int = 0
) -> Ratings:
    """Entries at distinct random places of a normal matrix of `rank`, with unit variance, and `noise` · ε besides."""
    if min(rows, columns, rank) < 1 or not 1 <= entries <= rows * columns:
        raise ValueError(
            f"no such data: rows={rows}, columns={columns} and rank={rank} must be at least 1, and entries={entries} "
            f"between 1 and {rows * columns}"
        )
    random = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(size, rank, generator=random, dtype=torch.float64) for size in (rows, columns))
    places = torch.randperm(rows * columns, generator=random)[:entries].sort().values
    i, j = places // columns, places % columns
    values = (u[i] * v[j]).sum(1) / rank**0.5
    return Ratings(i, j, values + noise * torch.randn(entries, generator=random, dtype=torch.float64), rows, columns)


def word_counts(path: str, speeches: int = 20, least: int = 5) -> Ratings:
    """log(1 + n) of how often each word is in each of the `scenes` of a text, for those that are there."""
    documents, words, num_documents, num_words = scenes(path, speeches, least)
    places, counts = torch.unique(documents * num_words + words, return_counts=True)
    return Ratings(places // num_words, places % num_words, counts.double().log1p(), num_documents, num_words)
