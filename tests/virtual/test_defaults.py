"""Every strategy, by its defaults, learns the shipped job, at the job's own learning rate, or names its needs."""

from __future__ import annotations

import math

import pytest

import polytempo as pt
from polytempo.core import NotFinite

JOB = pt.jobs.find("digits")
REFUSED = {
    "dgc": "once more",
    "halos": "moves the resulting model by every 32 pushes of a region",
    "interleaved": "can be cut into at most 2 parts",
}
"""The optimizer has momentum already; the run is too short for pushes of pushes; the model has two layers."""


@pytest.mark.parametrize("call", ["diloco(period=8)", "diloco", "slowmo", "sign_sgd"])
def test_what_once_did_not_learns_by_its_defaults(call: str) -> None:
    """Losses after 15 epochs: 0.066, 0.053, 0.095, 0.107. By the papers' values: 15.4, 0.447, 0.329, 84.9."""
    result = pt.simulate(JOB, pt.parse_strategy(call), workers=2, epochs=8)
    assert result.loss is not None
    assert result.loss < 0.2
    assert result.accuracy is not None
    assert result.accuracy > 0.96


@pytest.mark.parametrize("name", sorted(pt.strategies.__all__))
def test_defaults_learn_what_ships(name: str) -> None:
    strategy = pt.parse_strategy(name)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            pt.simulate(JOB, strategy, workers=4, epochs=5)
        return
    lr = 0.02 if name == "synthetic_gradients" else None  # which the next test is about
    result = pt.simulate(JOB, strategy, workers=2, epochs=5, lr=lr)
    assert result.loss is not None
    assert math.isfinite(result.loss)
    assert result.loss < 0.5
    assert result.accuracy is not None
    assert result.accuracy > 0.9


def test_estimates_that_grow_without_end_name_the_rate_to_take() -> None:
    """The rate is a fifth of the job's 0.1, and it learns."""
    strategy = pt.strategies.synthetic_gradients()
    with pytest.raises(NotFinite, match=r"learning rate: a fifth of this one is 0\.02"):
        pt.simulate(JOB, strategy, workers=2, epochs=8)
    assert pt.simulate(JOB, strategy, workers=2, epochs=8, lr=0.02).accuracy > 0.95  # type: ignore[operator]
