"""Every strategy under every loop of the catalogue, on one rank: as it means, or refused as it stands.

Without all cases each loop meets some of the strategies, the next loop others.
"""

from __future__ import annotations

from functools import cache

import pytest

from laws.catalogue import Row
from laws.loop_outcomes import ONE_ROUTE, Wrong, wrong_on
from laws.loops import LOOPS, Loop
from some_cases import some_of

pytestmark = pytest.mark.process


def rows(loop: Loop) -> list[Row]:
    return some_of(ONE_ROUTE, LOOPS.index(loop))


@cache
def wrong_with_those_like(like: object) -> dict[str, Wrong]:
    """The errors under each loop with the same meaning. One process runs them: their meaning is run once."""
    (found,) = wrong_on(1, rows, [loop for loop in LOOPS if loop.like is like])
    return found


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_every_strategy_takes_the_loop_for_what_it_means(loop: Loop) -> None:
    assert wrong_with_those_like(loop.like)[loop.name] == {}
