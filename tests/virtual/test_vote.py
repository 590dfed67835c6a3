"""A vote of signs: its table, and what a minority can do."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helpers import bundles, flats
from polytempo.aggregation import merged, vote
from polytempo.compression import all_gather, exact, reduce_scatter, through

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([3.0], 1.0),
        ([-1e-30, -2.0, 9.0], -1.0),
        ([1.0, -5.0], 0.0),
        ([0.0, 0.0, 2.0], 1.0),
        ([0.0, -0.0], 0.0),
        ([NAN, -1.0], -1.0),
        ([INF, -1.0, -1.0], -1.0),
    ],
)
def test_the_table(votes: list[float], expected: float) -> None:
    assert float(vote([torch.tensor([value]) for value in votes])) == expected


def test_two_of_five_cannot_turn_what_three_agree_on() -> None:
    for lies in product([-1e9, 0.0, 1e9, NAN], repeat=2):
        rows = [torch.tensor([value]) for value in (1.0, 0.1, 2.0, *lies)]
        assert float(vote(rows)) == 1.0


def test_it_is_a_merge_that_only_an_all_gather_takes() -> None:
    rows = [torch.tensor(row, dtype=torch.float64) for row in ([1.0, -2.0, 3.0], [1.0, 2.0, -3.0], [-1.0, 5.0, -0.5])]
    for transform in (merged(vote), through(exact(), vote, all_gather), through(exact(), vote)):
        assert [flat.tolist() for flat in flats(transform, bundles(rows))] == [[1.0, 1.0, -1.0]] * 3
    with pytest.raises(ValueError, match=r"vote needs whole vectors .* use route=all_gather"):
        through(exact(), vote, reduce_scatter)


def test_no_rank_s_buffer_is_touched() -> None:
    rows = [torch.tensor([2.0, -3.0]), torch.tensor([1.0, 4.0])]
    vote(rows)
    assert [row.tolist() for row in rows] == [[2.0, -3.0], [1.0, 4.0]]
