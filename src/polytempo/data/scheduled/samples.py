"""Samples for scheduled programs: tables for linear models, documents for topic models, entries of a large matrix.

Linear models take x (n, p) in float64, and y (n,).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.data.readers.csv_regression import csv_regression
from polytempo.data.readers.libsvm import libsvm
from polytempo.data.readers.text import read_text


class Regression(NamedTuple):
    """The data of `lasso` and `logistic`."""

    x: Tensor
    """(n, p), float64."""
    y: Tensor
    """(n,), float64."""


def correlated(
    rows: int = 500,
    columns: int = 1000,
    block: int = 20,
    correlation: float = 0.9,
    nonzeros: int = 30,
    noise: float = 0.1,
    seed: int = 0,
) -> Regression:
    """Normal columns in blocks, correlated ρ within a block and 0 between blocks, and y = Xβ + noise · std(Xβ) · ε.

    xᵢⱼ = √ρ bᵢ + √(1-ρ) εᵢⱼ, b being the block's; β has `nonzeros` normal entries at random places.
    """
    x, scores, random = _drawn(rows, columns, block, correlation, nonzeros, seed)
    return Regression(x, scores + noise * scores.std() * _normal(rows, random=random))


def correlated_classes(
    rows: int = 500,
    columns: int = 1000,
    block: int = 20,
    correlation: float = 0.9,
    nonzeros: int = 30,
    seed: int = 0,
) -> Regression:
    """The columns of `correlated`, with labels -1 and 1 drawn by σ(3 Xβ / std(Xβ))."""
    x, scores, random = _drawn(rows, columns, block, correlation, nonzeros, seed)
    chances = torch.sigmoid(3 * scores / scores.std())
    drawn = torch.rand(rows, generator=random, dtype=torch.float64)
    return Regression(x, torch.where(drawn < chances, 1.0, -1.0).double())


def table(path: str, target: str) -> Regression:
    """A CSV file with a header; `target` is the column to predict. Standardised as `csv_regression` does it.

    Its rows to train on, 80 % of all: `pt.data.csv_regression` has the others.
    """
    x, y = csv_regression(_file(path), target).train.tensors
    return Regression(x.double(), y.flatten().double())


def classes(path: str) -> Regression:
    """A LIBSVM file of two classes as dense columns."""
    x, labels = libsvm(_file(path), _file(path)).train.tensors
    if not labels.dtype == torch.long:
        raise ValueError(f"{path} has labels of other numbers; two classes need -1 and 1, or 0 and 1")
    return Regression(x.double(), 2.0 * labels.double() - 1.0)


def _drawn(
    rows: int, columns: int, block: int, correlation: float, nonzeros: int, seed: int
) -> tuple[Tensor, Tensor, torch.Generator]:
    """X and Xβ, and the generator for the next draws."""
    if rows < 2 or min(columns, block) < 1 or not 0 <= correlation < 1 or not 1 <= nonzeros <= columns:
        raise ValueError(
            f"no such data: rows={rows} (at least 2), columns={columns}, block={block} (at least 1), "
            f"correlation={correlation:g} (0 to below 1), nonzeros={nonzeros} (1 to {columns})"
        )
    random = torch.Generator().manual_seed(seed)
    common = _normal(rows, -(-columns // block), random=random).repeat_interleave(block, dim=1)[:, :columns]
    x = common.mul_(correlation**0.5).add_(_normal(rows, columns, random=random), alpha=(1 - correlation) ** 0.5)
    weights = torch.zeros(columns, dtype=torch.float64)
    weights[torch.randperm(columns, generator=random)[:nonzeros]] = _normal(nonzeros, random=random)
    return x, x @ weights, random


def _normal(*shape: int, random: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def _file(path: str) -> Path:
    found = Path(path)
    if not found.is_file():
        raise ValueError(f"there is no file {path}; name an existing one")
    return found


_MOST_DOCUMENTS = 0.5
"""A word that more of the documents have tells none from another."""


class Documents(NamedTuple):
    """Token t is word `words[t]` of document `documents[t]`; tokens of a document follow each other."""

    documents: Tensor
    """(m,), int64."""
    words: Tensor
    num_documents: int
    num_words: int


def drawn_documents(
    documents: int = 200, words: int = 500, length: int = 100, topics: int = 10, seed: int = 0
) -> Documents:
    """Documents that the model draws, each of `length` words; α = 0.1 for their topics, β = 0.05 for topics' words."""
    if min(documents, words, length, topics) < 1:
        raise ValueError(
            f"no such data: documents={documents}, words={words}, length={length}, topics={topics}; each is at least 1"
        )
    random = torch.Generator().manual_seed(seed)
    of_topic = _dirichlet(topics, words, 0.05, random)
    of_document = _dirichlet(documents, topics, 0.1, random)
    drawn = torch.multinomial(of_document, length, replacement=True, generator=random).flatten()
    tokens = torch.multinomial(of_topic[drawn], 1, generator=random).flatten()
    return Documents(torch.arange(documents).repeat_interleave(length), tokens, documents, words)


def scenes(path: str, speeches: int = 20, least: int = 5) -> Documents:
    """A play, with blank lines between its speeches, cut into documents of so many speeches.

    Words are runs of letters in lower case, without speakers' names (the line with a colon that begins a speech), words
    that are there fewer than `least` times, and words that more than half of the documents have. Numbered by alphabet.
    """
    if min(speeches, least) < 1:
        raise ValueError(f"speeches={speeches} and least={least} must be at least 1")
    found = _read(Path(path))
    cut = [found[first : first + speeches] for first in range(0, len(found), speeches)]
    tokens = [[word for speech in each for word in re.findall(r"[a-z]+", speech.lower())] for each in cut]
    counts = Counter(word for each in tokens for word in each)
    spread = Counter(word for each in tokens for word in set(each))
    kept = sorted(word for word in counts if counts[word] >= least and spread[word] <= _MOST_DOCUMENTS * len(cut))
    number = {word: place for place, word in enumerate(kept)}
    pairs = [(place, number[word]) for place, each in enumerate(tokens) for word in each if word in number]
    if not pairs:
        raise ValueError(f"{path}: no word is there {least} times and in at most half of {len(cut)} documents")
    documents, words = torch.tensor(pairs).T.contiguous()
    return Documents(documents, words, len(cut), len(kept))


def _read(path: Path) -> list[str]:
    """The speeches without their speakers."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; name a text")
    return [re.sub(r"\A[^\n]*:\n", "", speech) for speech in re.split(r"\n\s*\n", read_text(path)) if speech.strip()]


def _dirichlet(rows: int, columns: int, concentration: float, random: torch.Generator) -> Tensor:
    """Rows drawn from a symmetric Dirichlet distribution; `torch.distributions` has no generators."""
    gammas = torch._standard_gamma(torch.full((rows, columns), concentration, dtype=torch.float64), generator=random)
    return gammas.clamp(min=1e-12) / gammas.clamp(min=1e-12).sum(1, keepdim=True)


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
    """Entries at distinct random places of a normal matrix of `rank`, with unit variance, plus `noise` · ε."""
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
    """log(1 + n) of the count of each word in each of the `scenes` of a text, for words that are there."""
    documents, words, num_documents, num_words = scenes(path, speeches, least)
    places, counts = torch.unique(documents * num_words + words, return_counts=True)
    return Ratings(places // num_words, places % num_words, counts.double().log1p(), num_documents, num_words)
