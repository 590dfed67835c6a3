"""A worker's memory, reckoned from shapes."""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs import find
from polytempo.runs.job_memory import estimated
from polytempo.spec.options import RunOptions
from polytempo.spec.run_spec import RunSpec

PARAMETERS = 4 * (64 * 128 + 128 + 128 * 10 + 10)


def test_memory_is_a_sum_of_parts() -> None:
    """digits: SGD with momentum. A residual for the two matrices; gradients travel in a buffer of their own."""
    spec = RunSpec.of(find("digits"), pt.strategies.one_bit_sgd(), 4, RunOptions())
    found = estimated(spec, 1000)
    assert found[:5] == (PARAMETERS, PARAMETERS, PARAMETERS, 0, 1000)
    assert (found.strategy, found.exchanged) == (4 * (64 * 128 + 128 * 10), PARAMETERS)
    assert found.total == found.alone + found.strategy + found.exchanged
    alone = RunSpec.of(find("digits"), pt.strategies.one_bit_sgd(), 1, RunOptions())
    assert estimated(alone, 0)[5:] == (0, 0)
