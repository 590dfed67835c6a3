"""A virtual worker that computes 30 % longer is named by the same judge as a real one, and the run is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cluster import Cluster
from polytempo.core import Strategy
from polytempo.report.status.records import Diagnosis
from polytempo.report.status.stream import stream

s = pt.strategies
SLOW = 2


def job() -> pt.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(960, 16, generator=generator)
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)),
        data=lambda folder: pt.Data(TensorDataset(x, x.sum(1, keepdim=True)), None),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=8,
        lr=0.01,
    )


def factor(random: Random, host: int) -> float:
    return (1.3 if host == SLOW else 1.0) * random.uniform(0.97, 1.03)


def quiet(random: Random, host: int) -> float:
    return random.uniform(0.97, 1.03)


def cluster(stragglers: Any = factor) -> Cluster:
    return replace(pt.cluster.ethernet(), stragglers=stragglers, flops_per_s=1e7)


def diagnoses(folder: Path) -> list[Diagnosis]:
    return [each for each in stream(folder) if isinstance(each, Diagnosis)]


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd(period=4), s.gossip(), s.delayed_sgd(delay=2)], ids=str)
def test_a_slow_worker_of_four_is_named_within_20_steps(strategy: Strategy, tmp_path: Path) -> None:
    pt.simulate(job(), strategy, 4, cluster(), steps=20, out=tmp_path / "a")
    [found] = diagnoses(tmp_path / "a")
    assert (found.about, found.who, found.rank) == ("slow rank", f"rank-{SLOW}", SLOW)
    assert found.step in range(1, 21)
    assert found.values["slower"] == pytest.approx(0.3, abs=0.03)
    assert found.values["since_step"] <= 3


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd(period=4), s.gossip()], ids=str)
def test_a_quiet_run_names_nobody(strategy: Strategy, tmp_path: Path) -> None:
    pt.simulate(job(), strategy, 4, cluster(quiet), steps=300, out=tmp_path / "a")
    assert diagnoses(tmp_path / "a") == []


def test_a_slow_stage_is_named_by_its_number(tmp_path: Path) -> None:
    pt.simulate(job(), s.gpipe(stages=2), 2, cluster(lambda random, host: 3.0 if host else 1.0), steps=30, out=tmp_path)
    [found] = diagnoses(tmp_path)
    assert found.who == "rank-1"
    assert found.text.startswith("stage 1 (rank 1) is ")
    assert found.values["slower"] > 0.3


@pytest.mark.parametrize("strategy", [s.async_sgd(), s.downpour()], ids=str)
def test_a_slow_worker_of_a_server_is_named(strategy: Strategy, tmp_path: Path) -> None:
    pt.simulate(job(), strategy, 4, cluster(), epochs=4, out=tmp_path / "a")
    assert [(each.who, each.rank) for each in diagnoses(tmp_path / "a")] == [(f"worker-{SLOW}", SLOW)]
    pt.simulate(job(), strategy, 4, cluster(quiet), epochs=4, out=tmp_path / "b")
    assert diagnoses(tmp_path / "b") == []
