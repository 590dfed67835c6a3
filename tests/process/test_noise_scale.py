"""The noise scale on real processes: no bit of a run changes, both worlds measure the same, loops have it at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import batches, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies
ring = pt.collectives.ring
WORKERS = 3
STEPS = 12


def job() -> pt.Job:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 1)),
        data=lambda folder: pt.Data(TensorDataset(x, x.sum(1, keepdim=True))),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=4,
        lr=0.02,
        epochs=4,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "noise_trace" in row]


@pytest.mark.parametrize("strategy", [s.sync_sgd(route=ring), s.local_sgd(period=3, route=ring)], ids=str)
def test_both_worlds_measure_the_same_and_change_nothing(strategy: pt.Strategy, tmp_path: Path) -> None:
    plain = pt.run(job(), strategy, WORKERS, threads=1)
    real = pt.run(job(), strategy, WORKERS, threads=1, noise_scale=4, out=tmp_path / "real")
    virtual = pt.simulate(job(), strategy, WORKERS, threads=1, noise_scale=4, out=tmp_path / "virtual")
    assert real.parameters_sha256 == plain.parameters_sha256 == virtual.parameters_sha256
    assert real.bytes_sent_per_rank == plain.bytes_sent_per_rank
    heard, known = rows(tmp_path / "real"), rows(tmp_path / "virtual")
    assert heard
    # Between processes a look is heard of with the next one.
    measured = [row["noise_trace"] for row in known]
    assert all(any(row["noise_trace"] == pytest.approx(each) for each in measured) for row in heard)


def test_workers_of_a_parameter_server_measure_each_for_itself(tmp_path: Path) -> None:
    pt.run(job(), s.downpour(), 2, threads=1, noise_scale=2, out=tmp_path)
    assert {row["worker"] for row in rows(tmp_path)} == {0, 1}


def test_a_loop_of_its_own_has_it_at_hand() -> None:
    """The noise scale is the same on all ranks, and follows from the gradients: a linear model's are known."""

    def work(world: ProcessWorld) -> Result:
        found: list[Any] = []
        for probe in ({}, {"noise_scale": 1, "batch_size": 4}):
            net = small()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            handle = pt.attach(net, optimizer, s.sync_sgd(route=ring), **probe)
            for inputs, targets in mine(batches(STEPS), world):
                optimizer.zero_grad()
                squared(net(inputs), targets).backward()
                optimizer.step()
            handle.detach()
            found.append([float(p.detach().double().sum()) for p in net.parameters()])
            found.append(None if handle.noise_scale is None else [handle.noise_scale.steps, *handle.noise_scale.mean])
        return found

    everywhere = together(3, work)
    assert everywhere[1] == everywhere[2] == everywhere[0]
    unmeasured, nothing, measured, noise = everywhere[0]
    assert nothing is None
    assert measured == unmeasured
    assert noise[0] == STEPS
    assert noise[2] > 0


def test_ranks_that_ask_for_different_looks_are_named() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with pytest.raises(pt.errors.Mismatch, match="noise_scale"):
            pt.attach(net, optimizer, noise_scale=2 + world.rank, batch_size=4)
        with pytest.raises(ValueError, match="PT1107"):
            pt.attach(net, optimizer, s.downpour(), noise_scale=32, batch_size=4)
        return []

    together(2, work)
