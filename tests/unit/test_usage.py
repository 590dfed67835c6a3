"""The account of samples: in order, and by the tickets of a parameter server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cluster import Crash
from polytempo.data.batches import Batches
from polytempo.data.usage import in_order, of_tickets


def row(first: int, last: int, samples: int, once: int, dropped: int = 0) -> dict[str, int]:
    return {
        "first_epoch": first,
        "last_epoch": last,
        "samples": samples,
        "once": once,
        "twice": 0,
        "never": samples - once,
        "dropped": dropped,
    }


def test_in_order() -> None:
    assert in_order(10, 0, 0) == []
    assert in_order(10, 0, 3) == [row(0, 0, 10, 3)]
    assert in_order(10, 1, 0) == [row(0, 0, 10, 10)]
    assert in_order(10, 7, 10) == [row(0, 7, 10, 10)], "an epoch that has just ended may not be turned yet"
    assert in_order(10, 7, 3) == [row(0, 6, 10, 10), row(7, 7, 10, 3)]


def batches(samples: int = 10, batch_size: int = 4) -> Batches:
    """4, 4 and 2 samples."""
    return Batches(TensorDataset(torch.zeros(samples)), size=2, batch_size=batch_size)


def test_a_sample_counts_where_every_shard_has_its_gradient() -> None:
    """Two epochs: batch 1 (4 samples) is lacking at shard 0, batch 5 (2 samples) at shard 1."""
    assert of_tickets(batches(), [(0, 5)], [[(0, 0), (2, 5)], [(0, 4)]]) == [
        row(0, 0, 10, 6, dropped=4),
        row(1, 1, 10, 8, dropped=2),
    ]


def test_whole_epochs_are_one_row() -> None:
    assert of_tickets(batches(), [(0, 20)], [[(0, 20)]]) == [row(0, 6, 10, 10)]
    assert of_tickets(batches(), [(0, 18)], [[(0, 18)]]) == [row(0, 5, 10, 10), row(6, 6, 10, 4)]
    assert of_tickets(batches(), [], [[]]) == []


def test_what_was_never_dealt_is_not_dropped() -> None:
    assert of_tickets(batches(), [(0, 0)], [[(0, 0)]]) == [row(0, 0, 10, 4, dropped=0)]


def test_a_batch_of_slices_counts_with_its_last_one() -> None:
    """Three numbers a batch; a batch of two slices has the first and the last; batch 1 is not closed."""
    assert of_tickets(batches(), [(0, 2)], [[(0, 0), (2, 4), (6, 8)]], numbers_per_batch=3) == [
        row(0, 0, 10, 6, dropped=4)
    ]


# ----------------------------------------------------------------------------------------------------- of whole runs

JOB = pt.Job(
    model=lambda: torch.nn.Linear(2, 1),
    data=lambda path: pt.Data(TensorDataset(torch.randn(44, 2), torch.randn(44, 1))),
    loss=torch.nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    batch_size=4,
)


def ledger(strategy: Any, **options: Any) -> Any:
    return pt.simulate(JOB, strategy, 4, **options).ledger


def test_runs_that_end_with_an_epoch_use_every_sample_once() -> None:
    for strategy in (pt.strategies.sync_sgd(), pt.strategies.downpour(), pt.strategies.ssp(), pt.strategies.flexrr()):
        assert ledger(strategy, epochs=3) == [row(0, 2, 44, 44)], strategy.name


def test_runs_that_end_within_an_epoch_say_so() -> None:
    assert ledger(pt.strategies.sync_sgd(), steps=4) == [row(0, 0, 44, 44), row(1, 1, 44, 16)]
    assert ledger(pt.strategies.async_sgd(), steps=4) == [row(0, 0, 44, 44), row(1, 1, 44, 20)]


def test_a_priced_run_uses_no_samples() -> None:
    assert ledger(pt.strategies.sync_sgd(), steps=4, meta=True) is None


def test_backup_workers_drop_what_comes_late_and_crashes_lose_nothing() -> None:
    slow = pt.cluster.ethernet(stragglers=pt.cluster.slow_host(factor=5))
    [found] = ledger(pt.strategies.backup_workers(backups=1), epochs=1, cluster=slow)
    assert found["never"] == found["dropped"] > 0
    assert found["once"] + found["never"] == 44
    crash = replace(pt.cluster.ethernet(), faults=(Crash(rank=1, at_s=1e-4),))
    assert ledger(pt.strategies.async_sgd(), epochs=2, cluster=crash) == [row(0, 1, 44, 44)]
