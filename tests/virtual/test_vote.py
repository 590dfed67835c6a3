"""A vote of signs: its table, and a minority's power."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER, bundles, flats
from polytempo.aggregation import merged, vote
from polytempo.compression import all_gather, exact, reduce_scatter, sign, through
from polytempo.core import Bundle, Port, Transform
from polytempo.strategies import sign_sgd
from polytempo.worlds import VirtualWorld

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_thousand_votes_are_counted(dtype: torch.dtype) -> None:
    """bfloat16 has no 257, and float16 no 2049."""
    for up, down in ((620, 380), (380, 620), (500, 500), (2600, 2500)):
        answer = vote([torch.ones(1, dtype=dtype)] * up + [-torch.ones(1, dtype=dtype)] * down)
        assert answer.dtype is dtype
        assert float(answer) == (up > down) - (up < down)


# ---------------------------------------------------------------------- entries without a gradient

UNUSED = slice(0, 40)
"""Rows of (80, 20) that no rank has a gradient for."""


def moved(transform: Transform, num_ranks: int, num_steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The distance of each entry from its start after each step of length 1, (num_steps, 80, 20)."""

    async def program(port: Port) -> Tensor:
        state, place, history = transform.init(Bundle({"w": torch.zeros(80, 20, dtype=dtype)})), torch.zeros(80, 20), []
        for step in range(num_steps):
            gradient = torch.randn(80, 20, generator=torch.Generator().manual_seed(100 * step + port.rank)).abs()
            gradient[UNUSED] = 0
            answer, state = await transform.apply(port, Bundle({"w": gradient.to(dtype)}), state)
            place = place + answer.views["w"].float()
            history.append(place)
        return torch.stack(history)

    results = VirtualWorld(CLUSTER, num_ranks).run(program).results
    assert results[0] is not None
    assert all(torch.equal(results[0], other) for other in results if other is not None)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("exact_below", [0, 10**6])
def test_what_has_no_gradient_stays_where_it_is(exact_below: int, num_ranks: int, dtype: torch.dtype) -> None:
    """An even number of ranks, or signs as numbers: to the bit; an odd number: to one step."""
    history = moved(sign_sgd(exact_below=exact_below, scale=1.0).gradients, num_ranks, 7, dtype)
    assert float(history[-1, UNUSED.stop :].min()) == 7, "all ranks say up"
    farthest = float(history[:, UNUSED].abs().max())
    assert farthest == (1 if num_ranks % 2 and not exact_below else 0)
    assert float(history[1::2, UNUSED].abs().max()) == 0, "it is back every other step"


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_nor_does_it_go_away_by_a_sum_that_is_encoded_again(num_ranks: int) -> None:
    """One bit for the sum has no word for a tie, but says up and down in turn."""
    for route in (reduce_scatter, all_gather):
        history = moved(through(sign(scaled=False), route=route, exact_below=0), num_ranks, 8)
        assert float(history[:, UNUSED].abs().max()) <= num_ranks
        assert float(history[1::2, UNUSED].abs().max()) == 0


def test_with_feedback_it_comes_back() -> None:
    """Scaled signs move it, and so the residual: it stays within a few scales, where 60 steps in one way make 60."""
    history = moved(sign_sgd(feedback=True, exact_below=0).gradients, 2, 60)
    assert float(history[:, UNUSED].abs().max()) < 6
