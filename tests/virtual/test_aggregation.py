"""Mean and Adasum, against their definitions, written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import bundle, bundles, flats, normal
from polytempo.aggregation import adaptive_sum, adasum, mean
from polytempo.collectives import halving_doubling, ring, star, tree
from polytempo.core import Bundle, Route, native

WORLDS = range(2, 10)


# ---------------------------------------------------------------------- mean


@pytest.mark.parametrize("route", [native, ring, tree, halving_doubling, star], ids=lambda route: route.__name__)
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([bundle(1, 10), bundle(3, 30)], [2, 20]),
        ([bundle(1, 10, share=0.75), bundle(3, 30, share=0.25)], [1.5, 15]),
        ([bundle(1, 10, share=1.0), bundle(3, 30, share=0.0)], [1, 10]),
        ([bundle(8, 0, share=0.5), bundle(4, 0, share=0.25), bundle(0, 8, share=0.25)], [5, 2]),
        ([bundle(5, 7)], [5, 7]),
    ],
)
def test_mean_weighs_by_shares(route: Route, ranks: list[Bundle], expected: list[float]) -> None:
    assert [flat.tolist() for flat in flats(mean(route), [b.copy() for b in ranks])] == [expected] * len(ranks)


def test_with_share_0_not_even_nan_counts() -> None:
    given = [bundle(1, 10, share=1.0), bundle(float("nan"), float("inf"), share=0.0)]
    assert [flat.tolist() for flat in flats(mean(tree), given)] == [[1, 10]] * 2


def test_mean_of_mean_gradients_over_uneven_batches_is_the_gradient_of_the_joined_batch() -> None:
    samples = normal(1, 24)[0].view(12, 2)
    parts = samples.split([1, 4, 7])
    given = [Bundle({"w": part.mean(0)}, share=len(part) / 12) for part in parts]
    for flat in flats(mean(ring), given):
        torch.testing.assert_close(flat, samples.mean(0), rtol=1e-14, atol=1e-15)


def test_mean_of_16_bit_values_does_not_leave_their_range() -> None:
    large = [Bundle({"w": torch.full((3,), 40_000.0, dtype=torch.float16)}) for _ in range(4)]
    assert [flat.tolist() for flat in flats(mean(ring), large)] == [[40_000.0] * 3] * 4


# ---------------------------------------------------------------------- Adasum


def by_definition(a: Tensor, b: Tensor) -> Tensor:
    """Maleki et al., 2020, equation (2), for two vectors that are not zero."""
    dot, square_a, square_b = sum(a * b), sum(a * a), sum(b * b)
    return (1 - dot / (2 * square_a)) * a + (1 - dot / (2 * square_b)) * b


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.0, 0.0], [0.0, 5.0], [3.0, 5.0]),  # orthogonal: the sum
        ([2.0, 4.0], [2.0, 4.0], [2.0, 4.0]),  # equal: the mean
        ([2.0, 4.0], [4.0, 8.0], [3.0, 6.0]),  # parallel: the mean
        ([1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]),
        ([0.0, 0.0], [1.0, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [0.0, 0.0], [1.0, 2.0]),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_adasum_of_two(a: list[float], b: list[float], expected: list[float]) -> None:
    assert adaptive_sum(torch.tensor(a), torch.tensor(b)).tolist() == expected
    assert [flat.tolist() for flat in flats(adasum(), [bundle(*a), bundle(*b)])] == [expected, expected]


vectors = st.lists(st.floats(-100, 100).filter(lambda x: abs(x) > 1e-3), min_size=4, max_size=4)


@given(vectors, vectors)
def test_adasum_of_two_is_its_definition(a: list[float], b: list[float]) -> None:
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    torch.testing.assert_close(adaptive_sum(x, y), by_definition(x, y), rtol=1e-12, atol=1e-12)


def tree_of(rows: list[Tensor]) -> Tensor:
    """The recursion: rows beyond the largest power of two fold into the first ones, then neighbours pairwise."""
    power = 1 << (len(rows).bit_length() - 1)
    rows = [by_definition(row, rows[power + i]) if power + i < len(rows) else row for i, row in enumerate(rows[:power])]
    while len(rows) > 1:
        rows = [by_definition(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_adasum_of_many_is_the_tree_of_its_definition_and_equal_everywhere(num_ranks: int) -> None:
    rows = normal(num_ranks)
    first, *others = flats(adasum(), bundles(rows))
    torch.testing.assert_close(first, tree_of(rows), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal(num_ranks: int) -> None:
    orthogonal = [torch.eye(num_ranks, dtype=torch.float64)[rank] * (rank + 1) for rank in range(num_ranks)]
    assert flats(adasum(), bundles(orthogonal))[0].tolist() == [rank + 1 for rank in range(num_ranks)]
    equal = [torch.tensor([3.0, -4.0])] * num_ranks
    assert flats(adasum(), bundles(equal))[0].tolist() == [3.0, -4.0]


def test_adasum_has_one_dot_product_a_parameter() -> None:
    """Orthogonal in one parameter, equal in the other."""
    a = Bundle({"u": torch.tensor([1.0, 0.0]), "v": torch.tensor([[2.0]])})
    b = Bundle({"u": torch.tensor([0.0, 1.0]), "v": torch.tensor([[2.0]])})
    assert [flat.tolist() for flat in flats(adasum(), [a, b])] == [[1.0, 1.0, 2.0]] * 2
