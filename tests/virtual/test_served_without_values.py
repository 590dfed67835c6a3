"""A parameter server without values takes the time and messages of the run with values.

But for the rows of metrics, which travel as text: without a loss it is some bytes shorter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.jobs import find

DIGITS = find("digits")
CLUSTER = pt.cluster.ethernet(gflops=0.1, stragglers=pt.cluster.lognormal(0.4))


@pytest.mark.parametrize(
    "strategy",
    [
        pt.strategies.async_sgd(shards=2),
        pt.strategies.downpour(push_every=2),
        pt.strategies.easgd(period=2),
        pt.strategies.ssp(bound=1),
        pt.strategies.backup_workers(),
        pt.strategies.softsync(),
        pt.strategies.dc_asgd(),
        pt.strategies.staleness_aware(),
    ],
    ids=str,
)
def test_times_and_bytes_are_those_of_the_run_with_values(strategy: pt.Strategy) -> None:
    computed, priced = (
        pt.simulate(replace(DIGITS, epochs=9), strategy, 4, CLUSTER, steps=5, batch_size=8, meta=meta)
        for meta in (False, True)
    )
    assert priced.seconds == pytest.approx(computed.seconds, rel=1e-5)
    assert priced.bytes_sent_per_rank == pytest.approx(computed.bytes_sent_per_rank, rel=1e-3)
    assert (priced.steps, priced.samples) == (computed.steps, computed.samples)
    assert (priced.loss, priced.accuracy, priced.train_loss, priced.parameters_sha256) == (None, None, None, None)


def test_running_statistics_travel_without_values_too() -> None:
    job = replace(DIGITS, model=lambda: nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
    assert pt.simulate(job, pt.strategies.async_sgd(), 3, meta=True, steps=3).seconds > 0


def test_rows_of_tables_need_values() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(4, 10, sparse=True)

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.rows(torch.zeros(len(inputs), dtype=torch.int64))
            return found

    def plain(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr)

    job = replace(DIGITS, model=Table, optimizer=plain)
    with pytest.raises(ValueError, match=r"rows of rows.weight that travel depend on values; .* leave out meta"):
        pt.simulate(job, pt.strategies.async_sgd(), 3, meta=True, steps=3)
