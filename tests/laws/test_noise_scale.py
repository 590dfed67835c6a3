"""Measuring the noise scale changes no bit, no op and no time of a run, and every strategy measures the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt

s = pt.strategies
WORKERS = 4


def job() -> pt.Job:
    """Dropout draws and batch norm remembers. The last step of an epoch is uneven."""
    x = torch.randn(78, 4, generator=torch.Generator().manual_seed(0))
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1)),
        data=lambda folder: pt.Data(TensorDataset(x, x.sum(1, keepdim=True))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=4,
        lr=0.02,
        epochs=2,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "noise_trace" in row]


MEASURED = [
    s.sync_sgd(),
    s.int8_sgd(),
    s.top_k_sgd(0.1),
    s.one_bit_sgd(),
    s.power_sgd(rank=1),
    s.delayed_sgd(),
    s.shared_memory(),
    s.adasum(),
    s.local_sgd(period=3),
    s.diloco(period=3),
    s.post_local_sgd(switch_step=4, period=2),
    s.downpour(push_every=2),
    s.easgd(period=2),
]


@pytest.mark.parametrize("strategy", MEASURED, ids=lambda strategy: str(strategy).partition("(")[0])
def test_measuring_changes_nothing(strategy: pt.Strategy, tmp_path: Path) -> None:
    plain = pt.simulate(job(), strategy, WORKERS)
    watched = pt.simulate(job(), strategy, WORKERS, noise_scale=2, out=tmp_path)
    assert (watched.parameters_sha256, watched.trace_hash) == (plain.parameters_sha256, plain.trace_hash)
    assert watched.seconds == plain.seconds
    found = rows(tmp_path)
    assert found
    assert all(row["noise_trace"] > 0 for row in found if strategy.server is None)


def first(strategy: pt.Strategy, folder: Path) -> dict[str, Any]:
    pt.simulate(job(), strategy, WORKERS, noise_scale=100, steps=3, out=folder)
    return rows(folder)[0]


def test_what_is_measured_does_not_depend_on_the_strategy(tmp_path: Path) -> None:
    """All hold the same model and the same batches in the first step; gradients are seen before they are encoded."""
    strategies = [s.sync_sgd(), s.one_bit_sgd(), s.local_sgd(period=8), s.adasum()]
    found = [first(strategy, tmp_path / str(number)) for number, strategy in enumerate(strategies)]
    for row in found:
        assert row["noise_trace"] == pytest.approx(found[0]["noise_trace"], rel=1e-5)
        assert row["gradient_square"] == pytest.approx(found[0]["gradient_square"], rel=1e-5)
