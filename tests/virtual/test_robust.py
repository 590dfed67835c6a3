"""Robust merges: their definitions, and the power of one liar of five."""

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
from polytempo.aggregation import Merge, bulyan, krum, mean, median, merged, multi_krum, nearest_to_median, trimmed_mean
from polytempo.compression import int8, through
from polytempo.core import Promise, Transform
from some_cases import examples


def krum_by_definition(rows: list[Tensor], wrong: int) -> Tensor:
    def score(i: int) -> float:
        distances = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(len(rows)) if j != i)
        return sum(distances[: len(rows) - wrong - 2])

    return rows[min(range(len(rows)), key=score)]


def bulyan_by_definition(rows: list[Tensor], wrong: int) -> list[float]:
    left, chosen = list(rows), []
    while len(chosen) < len(rows) - 2 * wrong:
        near = min(max(1, len(left) - wrong - 2), len(left) - 1)
        scores = [sum(sorted(float(((a - b) ** 2).sum()) for b in left if b is not a)[:near]) for a in left]
        chosen.append(left.pop(scores.index(min(scores))))
    merged_values = []
    for column in torch.stack(chosen).t().tolist():
        middle = middle_of(column)
        kept = sorted(column, key=lambda value: abs(value - middle))[: len(rows) - 4 * wrong]
        merged_values.append(sum(kept) / len(kept))
    return merged_values


@settings(max_examples=examples(40))
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
        assert torch.equal(multi_krum(cut, kept=1)(rows), krum(cut)(rows))
    if num_ranks >= 4 * cut + 3:
        torch.testing.assert_close(bulyan(cut)(rows).tolist(), bulyan_by_definition(rows, cut))
    torch.testing.assert_close(bulyan(0)([*rows, *rows, *rows]), torch.stack(rows).mean(0))


ROBUST: list[Any] = [median, trimmed_mean(1), krum(1), multi_krum(1)]
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


def test_multi_krum_is_the_mean_of_those_that_krum_ranks_first() -> None:
    """Scores over the nearest 2 of 5: 0.5, 0.2, 0.5, 1.3, huge."""
    rows = [torch.tensor([value]) for value in (1.0, 1.1, 1.2, 2.0, 50.0)]
    assert float(multi_krum(1)(rows)) == pytest.approx(1.05)  # 5 - 1 - 2 = 2 are kept, the tie goes to the lower rank
    with pytest.raises(ValueError, match="needs at least 6 ranks, got 5; lower its numbers or add"):
        multi_krum(1, kept=3)(rows)
    with pytest.raises(ValueError, match="keeps at least 1 buffer, got kept=0"):
        multi_krum(kept=0)


@pytest.mark.parametrize("seed", range(3))
def test_bulyan_survives_the_attack_that_breaks_krum(seed: int) -> None:
    """Two of eleven send the honest mean, moved in one coordinate by 0.8 √d of the others' deviation: Krum takes it."""
    drawn = torch.Generator().manual_seed(seed)
    honest = torch.randn(9, 10_000, generator=drawn)
    wrong = honest.mean(0)
    wrong[7] += 0.8 * 10_000**0.5
    rows = [*honest, wrong, wrong.clone()]
    assert float(krum(2)(rows)[7]) > 70
    out = bulyan(2)(rows)
    assert honest[:, 7].min() <= out[7] <= honest[:, 7].max()
    assert (out - honest.mean(0)).abs().max() < 3


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_bulyan_of_seven_stays_in_the_range_of_the_honest(lie: list[float]) -> None:
    rows = [*normal(6, 2), torch.tensor(lie, dtype=torch.float64)]
    low, high = torch.stack(rows[:6]).amin(0), torch.stack(rows[:6]).amax(0)
    out = bulyan(1)(rows)
    assert ((low <= out) & (out <= high)).all()


@pytest.mark.parametrize("merge", [*ROBUST, bulyan(0)], ids=lambda merge: merge.__name__)
def test_a_merge_can_be_priced_without_values(merge: Merge) -> None:
    assert merge([torch.empty(7, device="meta")] * 5).shape == (7,)


@pytest.mark.parametrize(
    ("transform", "separable"), [(merged(median), True), (merged(trimmed_mean(1)), True), (merged(krum(1)), False)]
)
def test_only_krum_looks_at_the_whole_model_at_once(transform: Transform, separable: bool) -> None:
    assert (Promise.SEPARABLE in transform.promises) is separable


@pytest.mark.parametrize(
    ("merge", "num_ranks", "message"),
    [
        (trimmed_mean(2), 4, r"trimmed_mean\(cut=2\) needs at least 5 ranks, got 4; lower its numbers or add"),
        (krum(1), 4, r"krum\(wrong=1\) needs at least 5 ranks, got 4; lower its numbers or add"),
        (multi_krum(1), 4, r"multi_krum\(.*\) needs at least 5 ranks, got 4; lower its numbers or add"),
        (bulyan(1), 6, r"bulyan\(wrong=1\) needs at least 7 ranks, got 6; lower its numbers or add"),
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


@pytest.mark.parametrize("given", [1.5, 2.0, True, "1"])
def test_other_things_than_whole_numbers_are_refused(given: Any) -> None:
    for make in (trimmed_mean, krum, multi_krum, nearest_to_median, bulyan):
        with pytest.raises(ValueError, match=rf"(cut|wrong) must be a whole number, got {given!r}"):
            make(given)
    for kept_by in (multi_krum, nearest_to_median):
        with pytest.raises(ValueError, match=rf"kept must be a whole number, got {given!r}"):
            kept_by(1, given)


@pytest.mark.parametrize(
    ("merge", "least"),
    [
        (trimmed_mean(2), 5),
        (krum(0), 3),
        (krum(2), 7),
        (multi_krum(1), 5),
        (multi_krum(1, kept=4), 7),
        (nearest_to_median(0), 1),
        (nearest_to_median(2), 5),
        (nearest_to_median(1, kept=4), 5),
        (bulyan(1), 7),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_a_merge_says_how_many_ranks_it_needs(merge: Merge, least: int) -> None:
    assert merged(merge).least_ranks == through(int8(), merge).least_ranks == least
    assert merge(normal(least)).isfinite().all()
    if least > 1:
        with pytest.raises(ValueError, match=rf"needs at least {least} ranks, got {least - 1}; lower its numbers"):
            merge(normal(least - 1))


def test_any_pair_of_honest_ranks_outvotes_one_liar_in_a_median_of_three() -> None:
    for a, b in combinations([1.0, 2.0, 4.0], 2):
        assert a <= float(median([torch.tensor([a]), torch.tensor([b]), torch.tensor([1e6])])[0]) <= b
