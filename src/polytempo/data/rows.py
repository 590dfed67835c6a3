"""`SparseRows`: samples with few non-zero features, in compressed rows, and the sparsity of a data set.

Three numbers bound what Hogwild! loses by not locking. Samples are edges of a hypergraph, features its vertices: an
edge joins the features that its sample has.
"""

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
    """The feature of each entry; rising within a row."""
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


class Sparsity(NamedTuple):
    """Three numbers of a hypergraph with edges E: the smaller, the less do workers disturb each other."""

    omega: int
    """Ω = max |e|: the most features that a sample has."""
    delta: float
    """Δ = max |{e ∋ v}| / |E|: the part of the samples that have the commonest feature."""
    rho: float
    """max |{ê: ê ∩ e ≠ ∅}| / |E|: the largest part of the samples that share a feature with one of them."""


def sparsity(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> Sparsity:
    """Ω, Δ and ρ of samples in compressed rows: row r has the features indices[indptr[r]:indptr[r + 1]].

        rows = polytempo.data.rows.random_rows(2_000, 500)
        pt.data.sparsity(rows.starts, rows.columns)

    All three are exact; an entry counts with any value, and only once a row. Cost of ρ: a sample has at most as many
    neighbours as its features have samples together, so samples are counted from the highest such bound down, until no
    bound exceeds the largest count. One count reads that many entries: for n samples that all have the bound n it is n
    passes over a part of the data, seconds for 30,000 samples.

    Source: B. Recht, C. Re, S. Wright and F. Niu, "Hogwild!", 2011, equation (2.6).
    """
    num_rows = len(indptr) - 1
    if num_rows < 1 or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        raise ValueError(f"indptr must rise from 0 to the {len(indices)} entries, and have a row, got {indptr!r}")
    if not len(indices):
        return Sparsity(0, 0.0, 0.0)
    rows, columns = _entries(indptr, indices)
    sizes = np.bincount(rows, minlength=num_rows)
    degrees = np.bincount(columns)
    rho = _most_neighbours(rows, columns, sizes, degrees) / num_rows
    return Sparsity(int(sizes.max()), int(degrees.max()) / num_rows, rho)


def _entries(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row and column of each distinct entry, by row."""
    width = int(indices.max()) + 1
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    keys = np.unique(rows * width + indices)
    return keys // width, keys % width


def _most_neighbours(
    rows: NDArray[np.int64], columns: NDArray[np.int64], sizes: NDArray[np.int64], degrees: NDArray[np.int64]
) -> int:
    num_rows = len(sizes)
    by_column = rows[np.argsort(columns, kind="stable")]
    samples = np.split(by_column, np.cumsum(degrees)[:-1])  # of each column
    features = np.split(columns, np.cumsum(sizes)[:-1])  # of each row
    bounds = np.minimum(np.bincount(rows, weights=degrees[columns], minlength=num_rows).astype(np.int64), num_rows)
    most = int(degrees.max())
    seen = np.zeros(num_rows, dtype=bool)
    for row in np.argsort(-bounds, kind="stable"):
        if bounds[row] <= most:
            break
        seen[:] = False
        for column in features[row]:
            seen[samples[column]] = True
        most = max(most, int(np.count_nonzero(seen)))
    return most
