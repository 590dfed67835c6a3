"""A run with shards that come and go takes the steps of one with fixed shards, to the bit under a fixed schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.optim import SGD, Adagrad, Adam

from polytempo import strategies
from polytempo.cluster import Crash, ethernet
from polytempo.core import Strategy
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate

DIGITS = find("digits")
THERE_AND_BACK = {1: 3, 2: 1}
"""2 shards at first, 3 after an epoch, 1 after two."""


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
        lambda parameters, lr: Adagrad(parameters, lr=lr),
        lambda parameters, lr: Adam(parameters, lr=lr / 10),
    ],
    ids=["momentum", "adagrad", "adam"],
)
def test_what_the_optimizer_remembers_moves_bit_by_bit(optimizer: Any) -> None:
    job, strategy = replace(DIGITS, optimizer=optimizer), strategies.backup_workers(backups=0, shards=2)
    hashes = {
        simulate(job, strategy, 3, epochs=3, batch_size=120, reshape=reshape).parameters_sha256
        for reshape in ({}, THERE_AND_BACK, {1: 1, 2: 4})
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.async_sgd(shards=2, replicas=1),
        strategies.softsync(n=2, shards=2),
        strategies.ssp(shards=2),
        strategies.easgd(shards=2),
        strategies.dc_asgd(shards=2),
        strategies.backup_workers(backups=1, shards=2),
    ],
    ids=str,
)
def test_every_strategy_goes_on_with_other_shards(strategy: Strategy) -> None:
    result = simulate(DIGITS, strategy, 3, epochs=3, batch_size=60, reshape=THERE_AND_BACK)
    assert result.samples == 3 * 1437
    server = result.server
    assert server is not None
    assert sum(worker["samples"] for worker in server["workers"]) == 3 * 1437
    assert server["refused"] == server["repeated"] == 0


def test_a_shard_drained_takes_its_copies_with_it_and_nobody_misses_them() -> None:
    cluster = replace(ethernet(), faults=(Crash(rank=1, step=5), Crash(rank=4, at_s=1e-3)))  # a worker, a copy
    result = simulate(
        DIGITS, strategies.async_sgd(shards=2, replicas=1), 3, cluster, epochs=3, batch_size=60, reshape=THERE_AND_BACK
    )
    assert result.samples == 3 * 1437
    assert result.server is not None
    assert result.server["updates"] == 3 * 24


def test_what_cannot_be_reshaped_is_refused() -> None:
    strategy = strategies.async_sgd(shards=2)
    with pytest.raises(ValueError, match="3 shards after epoch 2, but the run ends after 2 epochs"):
        simulate(DIGITS, strategy, 2, epochs=2, reshape={2: 3})
    with pytest.raises(ValueError, match=r"reshape=\{1: 0\}: must be"):
        simulate(DIGITS, strategy, 2, epochs=2, reshape={1: 0})
    with pytest.raises(ValueError, match="leaves no snapshots to resume from"):
        simulate(DIGITS, strategy, 2, out="runs/x", resume=True, reshape={1: 3})
