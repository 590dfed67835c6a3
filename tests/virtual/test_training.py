"""The training program: its clock, its draws, and the state that it leaves unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from polytempo import cluster, data, strategies, then
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Data, Job
from polytempo.spec.run_options import RunOptions


class Noisy(Dataset[Any]):
    """Samples with noise that is drawn when they are read, as augmentation does."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), index / 48) + torch.randn(3), torch.tensor([index / 48])


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


NOISY = Job(
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)),
    data=lambda folder: Data(Noisy()),
    loss=nn.functional.mse_loss,
    optimizer=sgd,
    batch_size=4,
    epochs=2,
)


@pytest.mark.parametrize("strategy", [strategies.sync_sgd(), strategies.local_sgd(period=10_000)], ids=str)
def test_waiting_for_a_slow_host_is_training_time_whichever_host_it_is(strategy: Any) -> None:
    seconds = [
        simulate(
            find("digits"), strategy, 3, cluster.ethernet(stragglers=cluster.slow_host(host, 10.0)), epochs=2
        ).seconds
        for host in range(3)
    ]
    assert seconds == pytest.approx([seconds[0]] * 3, rel=0.02)


def test_noise_that_the_data_draw_depends_on_seed_rank_and_step_alone() -> None:
    first = simulate(NOISY, strategies.sync_sgd(), 3)
    assert first.parameters_sha256 == simulate(NOISY, strategies.sync_sgd(), 3).parameters_sha256
    torch.manual_seed(77)
    torch.randn(5)
    assert first.parameters_sha256 == simulate(NOISY, strategies.sync_sgd(), 3).parameters_sha256
    assert first.parameters_sha256 != simulate(NOISY, strategies.sync_sgd(), 3, seed=1).parameters_sha256


def test_a_layer_that_the_job_froze_stays_frozen_after_an_evaluation() -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))
        model[0].eval()
        return model

    modes: list[bool] = []

    def spying_loss(output: Tensor, target: Tensor) -> Tensor:
        modes.append(models[0][0].training)
        return nn.functional.cross_entropy(output, target)

    models: list[Any] = []

    def remembered() -> nn.Module:
        models.append(frozen())
        return models[-1]

    job = replace(find("digits"), model=remembered, loss=spying_loss, epochs=3)
    simulate(job, strategies.sync_sgd(), 1)
    assert modes
    assert not any(modes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume": True}, "resume needs the run's folder"),
        ({"checkpoint_every": 5}, "checkpoint_every needs the run's folder"),
        ({"steps": 0}, "steps=0: must be a whole number >= 1"),
    ],
)
def test_options_that_no_run_could_use(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RunOptions(**options)


def test_a_simulation_refuses_what_it_would_ignore() -> None:
    job = find("digits")
    with pytest.raises(ValueError, match="scores of job digits have accuracy, loss"):
        simulate(job, strategies.sync_sgd(), 2, until={"speed": 1.0})
    with pytest.raises(ValueError, match="PT1311"):
        simulate(job, strategies.sync_sgd(), 2, out="anywhere", resume=True)
    with pytest.raises(ValueError, match="PT1312"):
        simulate(job, strategies.ssp(), 2, out="anywhere", checkpoint_every=1, meta=True)
    with pytest.raises(ValueError, match="PT1313"):
        simulate(job, strategies.ssp(), 2, start_from="anywhere", meta=True)
    with pytest.raises(ValueError, match="PT2008"):
        simulate(job, then(strategies.ssp(), 2, strategies.sync_sgd()), 2, meta=True)
    with pytest.raises(ValueError, match="PT1322"):
        simulate(job, strategies.sync_sgd(), 2, meta=True, epochs=2)
    with pytest.raises(ValueError, match="until needs a test set"):
        simulate(NOISY, strategies.sync_sgd(), 2, until={"loss": 0.1})
    with pytest.raises(ValueError, match="accuracy=… needs a job with an accuracy"):
        simulate(replace(job, correct=None), strategies.sync_sgd(), 2, until={"accuracy": 0.5})


def test_the_time_alone_needs_no_data_to_deal_so_there_may_be_more_workers_than_samples() -> None:
    job, workers = find("digits"), 3_000
    result = simulate(job, strategies.sync_sgd(), workers, meta=True, steps=2)
    assert (result.workers, result.steps) == (workers, 2)
    assert result.samples == 2 * workers * job.batch_size
    assert result.epochs == result.samples / len(job.data(None).train)  # type: ignore[arg-type]
    numel = sum(p.numel() for p in job.model().parameters())
    assert result.bytes_sent_per_rank == pytest.approx(2 * 2 * 4 * numel * (workers - 1) / workers, rel=1e-3)


def test_until_ends_at_the_first_epoch_that_reaches_it() -> None:
    job = find("digits")
    result = simulate(job, strategies.sync_sgd(), 2, until={"accuracy": 0.95})
    assert result.reached is True
    assert result.accuracy is not None
    assert result.accuracy >= 0.95
    assert result.epochs == int(result.epochs) < job.epochs
    never = simulate(job, strategies.sync_sgd(), 2, until={"accuracy": 0.999999}, epochs=1)
    assert never.reached is False


@pytest.mark.parametrize("strategy", [strategies.local_sgd(period=4), strategies.hogwild()], ids=str)
def test_until_ends_all_ranks_at_the_first_step_that_none_has_begun_when_the_score_comes(strategy: Any) -> None:
    """So it may be later than the step that was scored. The result is the model's at the end."""
    uneven = cluster.one_host(3, stragglers=cluster.lognormal(0.5))
    result = simulate(find("digits"), strategy, 3, uneven, until={"accuracy": 0.9})
    assert result.reached is True
    assert result.steps < 15 * find("digits").epochs
    unwatched = simulate(
        replace(find("digits"), data=lambda folder: Data(data.digits()[0])), strategy, 3, uneven, steps=result.steps
    )
    assert result.parameters_sha256 == unwatched.parameters_sha256
    assert result.trace_hash == unwatched.trace_hash
