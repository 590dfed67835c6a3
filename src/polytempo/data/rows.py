"""`SparseRows`: samples with few non-zero features, in compressed rows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polytempo.data.readers.libsvm import read_sparse


class SparseRows(NamedTuple):
    """`num_rows` samples: row r has the entries `starts[r]` to `starts[r + 1] - 1`, and the label `labels[r]`."""

    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    """Of each entry; rising within a row."""
    values: NDArray[np.float32]
    labels: NDArray[np.float32]
    """+1 or -1."""
    num_columns: int

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return len(self.labels)


def libsvm_rows(path: Path, num_columns: int | None = None) -> SparseRows:
    """The rows of a LIBSVM file of two classes, labelled -1/+1 or 0/1. Never dense: 8 bytes an entry, and
    while the file is read about a hundred."""
    found = read_sparse(path)
    classes = set(found.labels)
    if not (classes <= {-1.0, 1.0} or classes <= {0.0, 1.0}):
        raise ValueError(f"{path} has the labels {sorted(classes)[:4]}; two classes need -1 and 1, or 0 and 1")
    highest = max(found.columns, default=-1) + 1
    if num_columns is not None and num_columns < highest:
        raise ValueError(f"{path} has an index of {highest}, but num_columns is {num_columns}")
    counts = np.bincount(found.rows, minlength=len(found.labels))
    return SparseRows(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array(found.columns, np.int32),
        np.array(found.values, np.float32),
        np.where(np.array(found.labels) > 0, 1, -1).astype(np.float32),
        highest if num_columns is None else num_columns,
    )


def random_rows(num_rows: int, num_columns: int, density: float = 0.01, seed: int = 0) -> SparseRows:
    """Samples of a sparse logistic model: normal features at random columns, labels drawn by σ(z·w), w normal · 3.

    Each row has max(1, density · num_columns) entries, scaled to unit variance of z·1, at distinct columns.
    """
    if num_rows < 1 or num_columns < 1 or not 0 < density <= 1:
        raise ValueError(
            "random rows need a row, a column, and a density above 0 and up to 1; got "
            f"{num_rows} rows, {num_columns} columns and density {density}"
        )
    random = np.random.default_rng(seed)
    each = max(1, round(density * num_columns))
    columns = np.stack([_distinct(random, num_columns, each) for _ in range(num_rows)])
    values = random.standard_normal((num_rows, each), dtype=np.float32) / np.float32(each**0.5)
    truth = 3 * random.standard_normal(num_columns, dtype=np.float32)
    chances = 1 / (1 + np.exp(-(values * truth[columns]).sum(axis=1)))
    labels = np.where(random.random(num_rows) < chances, 1, -1).astype(np.float32)
    starts = np.arange(0, num_rows * each + 1, each, dtype=np.int64)
    return SparseRows(starts, columns.reshape(-1), values.reshape(-1), labels, num_columns)


def _distinct(random: np.random.Generator, num_columns: int, count: int) -> NDArray[np.int32]:
    return np.sort(random.choice(num_columns, count, replace=False, shuffle=False)).astype(np.int32)
