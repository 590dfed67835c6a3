"""Metrics of runs and loops on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.report.status.records import TestRow
from polytempo.report.status.stream import stream


def data(num_samples: int) -> TensorDataset:
    inputs = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def balanced(output: Tensor, target: Tensor) -> float:
    """The mean accuracy of both classes."""
    right = (output.argmax(-1) == target).double()
    return float((right[target == 0].mean() + right[target == 1].mean()) / 2)


JOB = pt.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
    data=lambda path: pt.Data(data(96), data(21)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    metrics={"balanced": balanced},
    batch_size=8,
    epochs=2,
)


@pytest.mark.parametrize("strategy", ["local_sgd(period=2)", "gpipe(stages=2)", "ssp"])
def test_a_run_has_the_numbers_of_its_simulation(strategy: str, tmp_path: Path) -> None:
    workers = 2 if "gpipe" in strategy else 3
    found = pt.run(JOB, strategy, workers, out=tmp_path, threads=1)
    rows = [record for record in stream(tmp_path) if isinstance(record, TestRow)]
    assert found.metrics == {"balanced": rows[-1].more["balanced"]}
    if strategy != "ssp":
        assert found.metrics == pt.simulate(JOB, strategy, workers, threads=1).metrics


def loop(info: RankInfo) -> dict[str, Any]:
    pt.init()
    torch.manual_seed(0)
    model = JOB.model()
    handle = pt.attach(model, optimizer := JOB.optimizer(model.parameters(), 0.1), pt.strategies.local_sgd(period=8))
    for inputs, target in pt.shard(data(96), batch_size=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    test = data(21)
    model.train()
    before = torch.get_rng_state()
    found = handle.evaluate(lambda batch: {"accuracy": model(batch[0]).argmax(-1) == batch[1]}, test)
    found |= handle.evaluate(lambda batch: (model(batch[0]), batch[1]), test, JOB.metrics)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    with handle.consensus(), torch.no_grad():
        output = model(test.tensors[0])
    right = (output.argmax(-1) == test.tensors[1]).double().mean()
    return {"found": found, "alone": {"accuracy": float(right), "balanced": balanced(output, test.tensors[1])}}


def test_a_loop_scores_the_ranks_common_model() -> None:
    answers = launch(loop, 3, threads=1, timeout_s=60)
    assert answers[0]["found"] == answers[1]["found"] == answers[2]["found"] == pytest.approx(answers[0]["alone"])
