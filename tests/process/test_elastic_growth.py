"""Batches of an elastic run grow, and workers join for the growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic, wanted_by_growth
from polytempo.spec.run_spec import RunSpec
from waiting import soon

pytestmark = pytest.mark.process

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
SAMPLES = TensorDataset(X, X.sum(1, keepdim=True).sin())
GROWTH = {1: 2.0, 3: 2.0}
EPOCHS = 40
"""Many, so that the newcomers find a run to join however busy the machine is."""
slow: list[float] = []


def job(joined: Path | None = None, **more: Any) -> pt.Job:
    """96 samples in batches of 8. Steps last longer and longer until the file is there, which says that workers have
    joined."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if joined is not None and output.requires_grad and not joined.exists():
            slow.append(min(0.5, 0.02 * 1.03 ** len(slow)))
            soon(joined.exists, slow[-1])
        return nn.functional.mse_loss(output, target)

    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
        data=lambda folder: pt.Data(SAMPLES, SAMPLES),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=8,
        lr=0.02,
        **more,
    )


def spec(strategy: pt.Strategy, made: pt.Job, **more: Any) -> RunSpec:
    options = pt.RunOptions(batch_growth=GROWTH, epochs=EPOCHS, threads=1, **{"max_workers": 3, **more})
    return RunSpec.of(made, strategy, 1, options)


def test_workers_join_as_the_batch_grows_and_each_sample_counts_once(tmp_path: Path) -> None:
    """Steps of 8, 16 and 32 samples, which 1, 2 and 3 workers share; 3 have to compute theirs in pieces."""
    seen = []

    def watch(launcher: ElasticLauncher) -> None:
        if launcher.view is not None and launcher.is_training:
            seen.append(len(launcher.view.members))
            if seen[-1] == 3:
                (tmp_path / "joined").touch()

    strategy = pt.strategies.sync_sgd()
    found = run_elastic(spec(strategy, job(tmp_path / "joined")), pt.engines.local(), watch=watch)
    assert (found.steps, found.samples) == (12 + 2 * 6 + (EPOCHS - 3) * 3, EPOCHS * 96)
    assert (seen[0], seen[-1]) == (1, 3)
    assert seen == sorted(seen)
    assert all(row["once"] == 96 for row in found.ledger or [])
    assert sum(row["last_epoch"] - row["first_epoch"] + 1 for row in found.ledger or []) == EPOCHS
    calm = pt.run(job(), strategy, 1, batch_growth=GROWTH, epochs=EPOCHS, threads=1)
    assert (found.steps, found.samples) == (calm.steps, calm.samples)
    assert found.loss == pytest.approx(calm.loss, rel=1e-4)


def test_as_many_workers_are_wanted_as_keep_each_one_s_batch() -> None:
    wanted = wanted_by_growth(spec(pt.strategies.sync_sgd(), job()))
    assert wanted is not None
    assert [wanted(epoch) for epoch in (0, 0.9, 1, 2.5, 3)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("more", "of_job", "said"),
    [
        ({"scaling": "local"}, {}, "PT1516"),
        ({}, {"schedule": pt.large_batch.schedule()}, "PT1517"),
        ({"batch_growth": pt.training.norm_test()}, {}, "PT1515"),
    ],
)
def test_what_cannot_grow_by_workers_is_refused(more: Any, of_job: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pt.run(job(**of_job), pt.strategies.sync_sgd(), 1, **{"batch_growth": GROWTH, "max_workers": 2, **more})
