"""Samples for linear models: x (n, p) in float64, and y (n,)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.data.readers.csv_regression import csv_regression
from polytempo.data.readers.libsvm import libsvm


class Regression(NamedTuple):
    """What `lasso` and `logistic` learn from."""

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
    """X and Xβ, and the generator for what comes next."""
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
        raise ValueError(f"there is no file {path}; name one that exists")
    return found
