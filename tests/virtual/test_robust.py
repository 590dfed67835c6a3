"""Robust merges: their definitions, and what one liar of five can do."""

from __future__ import annotations

from itertools import combinations
from statistics import median as middle_of
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import applied, bundles, flats, normal
from polytempo.aggregation import Merge, krum, mean, median, merged, trimmed_mean
from polytempo.core import Transform


def krum_by_definition(rows: list[Tensor], wrong: int) -> Tensor:
    def score(i: int) -> float:
        distances = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(len(rows)) if j != i)
        return sum(distances[: len(rows) - wrong - 2])

    return rows[min(range(len(rows)), key=score)]


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 10**6))
def test_robust_merges_are_their_definitions(num_ranks: int, cut: int, seed: int) -> None:
    rows = list(torch.randn(num_ranks, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    columns = [sorted(column) for column in torch.stack(rows).t().tolist()]
    torch.testing.assert_close(median(rows).tolist(), [middle_of(column) for column in columns])
    if num_ranks > 2 * cut:
        kept = [column[cut : num_ranks - cut] for column in columns]
        torch.testing.assert_close(trimmed_mean(cut)(rows).tolist(), [sum(k) / len(k) for k in kept])
    if num_ranks >= 2 * cut + 3:
        assert torch.equal(krum(cut)(rows), krum_by_definition(rows, cut))


ROBUST: list[Any] = [median, trimmed_mean(1), krum(1)]
LIES = [[1e6, -1e6], [float("inf"), float("-inf")], [float("nan"), float("nan")], [1e30, 1e30]]


@pytest.mark.parametrize("merge", ROBUST, ids=lambda merge: merge.__name__)
@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("liar", range(5))
def test_one_wrong_rank_of_five_cannot_leave_the_range_of_the_honest(merge: Merge, lie: list[float], liar: int) -> None:
    honest = [[1.0, 10.0], [1.1, 10.1], [1.2, 10.2], [1.3, 10.3]]
    rows = [torch.tensor(row) for row in [*honest[:liar], lie, *honest[liar:]]]
    first, *others = flats(merged(merge), bundles(rows))
    assert 1.0 <= first[0] <= 1.3
    assert 10.0 <= first[1] <= 10.31
    assert all(torch.equal(first, other) for other in others)
    assert not 0.0 <= flats(mean(), bundles(rows))[0][0] <= 100.0, "the mean follows the liar"


def test_two_wrong_ranks_of_seven() -> None:
    rows = [*normal(5, 3), torch.full((3,), 1e6), torch.full((3,), -1e6)]
    low, high = torch.stack(rows[:5]).amin(0), torch.stack(rows[:5]).amax(0)
    for merge in (median, trimmed_mean(2), krum(2)):
        out = merge([row.double() for row in rows])
        assert ((low <= out) & (out <= high)).all()


@pytest.mark.parametrize("merge", ROBUST, ids=lambda merge: merge.__name__)
def test_a_merge_can_be_priced_without_values(merge: Merge) -> None:
    assert merge([torch.empty(7, device="meta")] * 5).shape == (7,)


@pytest.mark.parametrize(
    ("transform", "separable"), [(merged(median), True), (merged(trimmed_mean(1)), True), (merged(krum(1)), False)]
)
def test_only_krum_looks_at_the_whole_model_at_once(transform: Transform, separable: bool) -> None:
    assert transform.separable is separable


@pytest.mark.parametrize(
    ("merge", "num_ranks", "message"),
    [
        (trimmed_mean(2), 4, r"trimmed_mean\(cut=2\) needs more than 4 ranks, got 4; lower cut or add workers"),
        (krum(1), 4, r"krum\(wrong=1\) needs at least 5 ranks, got 4; lower wrong or add workers"),
    ],
)
def test_too_few_ranks_for_the_promise_are_refused(merge: Merge, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        applied(merged(merge), bundles(normal(num_ranks)))


def test_negative_numbers_of_wrong_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="cut must be >= 0, got -1"):
        trimmed_mean(-1)
    with pytest.raises(ValueError, match="wrong must be >= 0, got -1"):
        krum(-1)


def test_any_pair_of_honest_ranks_outvotes_one_liar_in_a_median_of_three() -> None:
    for a, b in combinations([1.0, 2.0, 4.0], 2):
        assert a <= float(median([torch.tensor([a]), torch.tensor([b]), torch.tensor([1e6])])[0]) <= b
