"""How sparse a data set is, in the three numbers that bound what Hogwild! loses by not locking.

Samples are edges of a hypergraph, features its vertices: an edge joins the features that its sample has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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

    All three are exact; an entry counts whatever its value, and only once a row. Cost of ρ: a sample has at most as
    many neighbours as its features have samples together, so samples are counted from the highest such bound down,
    until no bound exceeds what was found. One count reads that many entries: for n samples that all have the bound n
    it is n passes over a part of the data, seconds for 30,000 samples.

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
