"""The limit that benchmarks compare with adds right: a limit that cheats would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polytempo.bench import limit
from polytempo.bench.limit import BLOCK_COUNT, Limit
from polytempo.bench.rank import BenchRank, crewed

pytestmark = pytest.mark.process

COUNTS = (1, 5, 64, 4096, 4099, BLOCK_COUNT, 2 * BLOCK_COUNT + 7)
"""One number, fewer than ranks need, either side of where the staged variant changes, one block, and three."""


def sums(crew: BenchRank) -> list[list[Any]]:
    """The error of each variant, at each count; three calls in a row, which use both slots of the staging."""
    found = []
    for count in COUNTS:
        program = Limit(crew.gloo, count)
        mine = torch.arange(count, dtype=torch.float32).remainder(7) + crew.rank
        alone = mine.clone()
        program.data.copy_(mine)
        right = crew.size**2 * (crew.size * mine - crew.size * crew.rank + sum(range(crew.size)))
        program.direct(3)
        program.staged(alone)(3)
        found.append([count, float((program.data - right).abs().max()), float((alone - right).abs().max())])
        crew.barrier()  # no rank gives memory back that others still read
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_limit_adds_right(size: int) -> None:
    """The sum over ranks, thrice: N² times the first. All numbers are small integers, so sums are exact."""
    assert crewed(sums, size) == [[[count, 0.0, 0.0] for count in COUNTS]] * size


def five_barriers(crew: BenchRank) -> list[float]:
    """Seconds of each."""
    met = Limit(crew.gloo, 64)
    seconds = met.barrier(5)
    crew.barrier()  # a rank that gives its memory back takes unread values of the other with it
    return seconds


def test_it_says_how_long_each_call_took() -> None:
    """The times are as many as the calls, and positive."""
    times = crewed(five_barriers, 2)
    assert [len(each) for each in times] == [5, 5]
    assert all(seconds > 0 for each in times for seconds in each)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 ranks, and these are 65"):
        limit._declared(65)
