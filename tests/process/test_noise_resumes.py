"""A run with data that draw random numbers goes on after a stop as if it had not stopped, its clock too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from polytempo import strategies
from polytempo.report.status.rows import read_metrics
from polytempo.runs.run import run
from polytempo.spec.job import Data, Job

pytestmark = pytest.mark.process


class Noisy(Dataset[Any]):
    """Samples with noise that is drawn when they are read, as augmentation does."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), index / 40) + torch.randn(3), torch.tensor([index / 40])


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


JOB = Job(
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)),
    data=lambda folder: Data(Noisy(), Noisy()),
    loss=nn.functional.mse_loss,
    optimizer=sgd,
    batch_size=4,
)


@pytest.mark.parametrize("cut", [3, 5], ids=["inside an epoch", "at its end"])
def test_resuming_repeats_nothing_and_loses_nothing(tmp_path: Path, cut: int) -> None:
    straight = run(JOB, strategies.local_sgd(period=4), 2, steps=8, out=tmp_path / "straight")
    run(JOB, strategies.local_sgd(period=4), 2, steps=cut, out=tmp_path / "cut")
    resumed = run(JOB, strategies.local_sgd(period=4), 2, steps=8, out=tmp_path / "cut", resume=True)
    assert resumed.parameters_sha256 == straight.parameters_sha256
    assert resumed.samples == straight.samples
    rows = [row for row in read_metrics(tmp_path / "cut") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 9))
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    tests = [row["step"] for row in read_metrics(tmp_path / "cut") if row["kind"] == "test"]
    assert tests == sorted(set(tests)), "no step is evaluated twice"
