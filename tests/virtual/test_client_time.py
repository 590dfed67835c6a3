"""Virtual time of rounds: a worker computes its clients' passes over their samples, one client after the other."""

from __future__ import annotations

from typing import Any

import pytest

import polytempo as pt
from laws.test_federated import SEED, data, job
from polytempo import federated as fed
from polytempo.core import Strategy

ROUNDS = 3


def seconds(strategy: Strategy, workers: int = 1, **more: Any) -> float:
    return pt.simulate(job(), strategy, workers=workers, seed=SEED, steps=ROUNDS, **more).seconds


def test_a_round_of_all_clients_takes_as_long_as_their_samples() -> None:
    """A second pass takes as long again, and the loss before training a third of a pass."""
    dealt = {"clients": "by_size(6, sigma=0.7)"}
    once, twice = (seconds(fed.fed_avg(6, epochs, 4), **dealt) for epochs in (1, 2))
    assert once == pytest.approx(seconds(pt.strategies.sync_sgd(), batch_size=len(data())))
    assert 0.9 * once < twice - once < once
    assert seconds(fed.q_fed_avg(6, 1.0, 1, 4), **dealt) - once == pytest.approx((twice - once) / 3)


def test_workers_share_the_passes_of_a_round() -> None:
    """Two workers have three of six equal clients each. Their exchange takes as long with more passes."""
    alone, two = (
        seconds(fed.fed_avg(6, 20, 4), workers, clients="iid(6)")
        - seconds(fed.fed_avg(6, 1, 4), workers, clients="iid(6)")
        for workers in (1, 2)
    )
    assert 0.4 * alone < two < 0.6 * alone
