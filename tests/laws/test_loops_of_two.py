"""Every strategy under every loop of the catalogue, on two ranks: as it means, or refused as it stands.

Without all cases each loop meets some of the strategies.
"""

from __future__ import annotations

import pytest

from laws.loop_outcomes import ON_TWO, wrong_on
from laws.loops import LOOPS, Loop
from some_cases import some_of

pytestmark = pytest.mark.process


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_every_strategy_takes_the_loop_for_what_it_means(loop: Loop) -> None:
    assert wrong_on(2, lambda _: some_of(ON_TWO, LOOPS.index(loop), of=1), [loop]) == [{loop.name: {}}] * 2
