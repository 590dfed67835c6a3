"""Every strategy under every loop of the catalogue, on one rank: as it means, or refused as it stands."""

from __future__ import annotations

import pytest

from laws.loop_outcomes import ONE_ROUTE, wrong_on
from laws.loops import LOOPS, Loop

pytestmark = pytest.mark.process


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_every_strategy_takes_the_loop_for_what_it_means(loop: Loop) -> None:
    assert wrong_on(1, ONE_ROUTE, loop) == [{}]
