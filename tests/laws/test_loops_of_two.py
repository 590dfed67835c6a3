"""Every strategy under every loop of the catalogue, on two ranks: as it means, or refused as it stands."""

from __future__ import annotations

import pytest

from laws.loop_outcomes import ON_TWO, wrong_on
from laws.loops import LOOPS, Loop

pytestmark = pytest.mark.process


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_every_strategy_takes_the_loop_for_what_it_means(loop: Loop) -> None:
    assert wrong_on(2, lambda _: ON_TWO, [loop]) == [{loop.name: {}}] * 2
