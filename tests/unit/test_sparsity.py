"""Ω, Δ and ρ of hypergraphs drawn by hand, and of random ones by the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.data import Sparsity, libsvm_rows, sparsity
from polytempo.data.rows import random_rows

Edges = list[list[int]]

HYPERGRAPHS: list[tuple[str, Edges, tuple[int, float, float]]] = [
    ("one edge", [[0, 3]], (2, 1.0, 1.0)),
    ("apart: nobody meets anybody but itself", [[0], [1], [2], [3]], (1, 1 / 4, 1 / 4)),
    ("a star: all have feature 0", [[0, 1], [0, 2], [0, 3, 4]], (3, 1.0, 1.0)),
    ("a path: the inner edges have two neighbours", [[0, 1], [1, 2], [2, 3], [3, 4]], (2, 2 / 4, 3 / 4)),
    ("one edge joins two groups that are apart", [[0], [0], [1], [1], [0, 1]], (2, 3 / 5, 5 / 5)),
    ("an empty sample meets nobody", [[], [5], [5, 6]], (2, 2 / 3, 2 / 3)),
    ("an entry twice in a row counts once", [[1, 1, 1], [2], [3]], (1, 1 / 3, 1 / 3)),
    ("no entries at all", [[], []], (0, 0.0, 0.0)),
]


def compressed(edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, edges)]).astype(np.int64)
    return starts, np.array([v for edge in edges for v in edge], np.int32)


def by_definition(edges: Edges) -> Sparsity:
    sets = [set(edge) for edge in edges]
    degrees = [sum(v in e for e in sets) for v in set().union(*sets)]
    neighbours = [sum(bool(e & other) for other in sets) for e in sets]
    most = max(map(len, sets))
    return Sparsity(most, max(degrees, default=0) / len(sets), max(neighbours) / len(sets))


@pytest.mark.parametrize(("edges", "expected"), [row[1:] for row in HYPERGRAPHS], ids=[row[0] for row in HYPERGRAPHS])
def test_hypergraphs_drawn_by_hand(edges: Edges, expected: tuple[int, float, float]) -> None:
    assert sparsity(*compressed(edges)) == Sparsity(*expected)


@given(st.lists(st.lists(st.integers(0, 12), max_size=5), min_size=1, max_size=12))
def test_it_is_what_the_definition_says(edges: Edges) -> None:
    assert sparsity(*compressed(edges)) == by_definition(edges)


@pytest.mark.parametrize(("indptr", "indices"), [([0], []), ([0, 3], [1, 2])], ids=["no row", "an entry is missing"])
def test_what_is_no_compressed_matrix(indptr: list[int], indices: list[int]) -> None:
    with pytest.raises(ValueError, match="indptr must rise from 0"):
        sparsity(np.array(indptr, np.int64), np.array(indices, np.int32))


def test_random_rows_are_as_dense_as_asked_for() -> None:
    rows = random_rows(300, 400, density=0.01, seed=3)
    found = sparsity(rows.starts, rows.columns)
    assert found.omega == 4
    assert 0.01 <= found.delta <= 0.05
    assert found.delta <= found.rho <= 4 * found.delta


def test_rows_of_a_libsvm_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("+1 1:0.5 4:2\n-1\n-1 4:1\n")
    rows = libsvm_rows(file)
    assert rows.starts.tolist() == [0, 2, 2, 3]
    assert rows.columns.tolist() == [0, 3, 3]
    assert rows.values.tolist() == [0.5, 2.0, 1.0]
    assert rows.labels.tolist() == [1, -1, -1]
    assert (rows.num_rows, rows.num_columns) == (3, 4)
    assert libsvm_rows(file, 9).num_columns == 9
    with pytest.raises(ValueError, match="an index of 4, but num_columns is 3"):
        libsvm_rows(file, 3)
    file.write_text("3 1:1\n")
    with pytest.raises(ValueError, match="two classes need -1 and 1"):
        libsvm_rows(file)


def test_a9a_is_dense_where_it_is_common(data_root: Path) -> None:
    rows = libsvm_rows(data_root / "a9a" / "a9a")
    found = sparsity(rows.starts, rows.columns)
    assert found.omega == 14
    assert found.delta == pytest.approx(0.9533, abs=1e-4)
    assert found.rho == pytest.approx(1.0, abs=1e-4)
