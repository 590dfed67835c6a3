"""Dean et al. 2012, section 4.1: with Adagrad in the shards Downpour SGD learns as if alone, at a fixed rate not.

Digits, plain SGD, 20 epochs, 8 replicas with exponential step times, and a sum of 5 gradients in each push. The rate α
= 0.2 is the best for one replica (of 0.1, 0.2, 0.4 and 0.8, three seeds: 1.1 to 2.2 % error).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.optim import SGD

from polytempo import strategies
from polytempo.cluster import Cluster, Link, exponential
from polytempo.core import Strategy
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate

JOB = replace(find("digits"), optimizer=lambda parameters, lr: SGD(parameters, lr=lr), lr=0.2, epochs=20)
BUSY = Cluster(Link(latency_s=1e-5, bytes_per_s=1e10), flops_per_s=1e8, stragglers=exponential())
"""Computing takes most of the time, so a gradient is stale because of the other replicas and not of the network."""


def error(strategy: Strategy, replicas: int, seed: int) -> float:
    """The error on the test set, after equally many samples for any number of replicas."""
    accuracy = simulate(JOB, strategy, replicas, BUSY, seed=seed).accuracy
    assert accuracy is not None
    return 1 - accuracy


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adagrad_bears_the_delays_that_a_fixed_rate_does_not(seed: int) -> None:
    serial = error(strategies.async_sgd(), 1, seed)
    assert error(strategies.downpour(optimizer="adagrad", lr=0.03), 8, seed) <= serial + 0.015
    assert error(strategies.downpour(optimizer="sgd"), 8, seed) >= serial + 0.15
