"""The norm test as a rule of a run: the time and size of a larger batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.data.shard import DataShard
from polytempo.jobs import find
from polytempo.large_batch.noise_scale import NoiseScale, Squares
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.growth import HeldRow, NormGrowth
from polytempo.training.step.noise_watch import NoiseWatch

s = pt.strategies
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
SEED = 3


def job(**more: Any) -> pt.Job:
    return pt.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 1)),
            "data": lambda folder: pt.Data(TensorDataset(X, X.sum(1, keepdim=True))),
            "loss": nn.functional.mse_loss,
            "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
            "batch_size": 4,
            "lr": 0.02,
            "epochs": 6,
            **more,
        }
    )


def growth(num_samples: int = 1000) -> tuple[NormGrowth, DataShard]:
    """Rank 0 of two, with 8 samples in the first global batch and θ = 1/2: 4 𝓑 is wanted."""
    shard = DataShard(TensorDataset(torch.zeros(num_samples)), rank=0, size=2, batch_size=4)
    net = nn.Linear(2, 1)
    watch = NoiseWatch(HeldRow(), s.sync_sgd(), dict(net.named_parameters()), every=8)
    return NormGrowth(pt.training.norm_test(theta=0.5), watch, shard), shard


class Port:
    """Answers an all-gather with rows that change nothing."""

    async def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [torch.full((4,), float("nan"))] * 2


def next_batch(made: NormGrowth, shard: DataShard, noise_scale: float, looks: int) -> int:
    """The batch after a look, when so many looks have found this noise scale."""
    made._watch.noise = NoiseScale(steps=looks, sum_of_gradient=1.0, sum_of_noise=noise_scale)
    made._held.row = torch.zeros(4)
    steps = made.grows(Port(), shard)  # type: ignore[arg-type]
    with pytest.raises(StopIteration) as ended:
        steps.send(None)
    assert ended.value.value == (shard.global_batch_size > 8)
    return shard.global_batch_size


@pytest.mark.parametrize(
    ("noise_scale", "looks", "batch"),
    [
        (2.0, 10, 8),  # wanted: 8
        (3.0, 10, 16),  # 12, in whole multiples of 8
        (100.0, 10, 16),  # 400, at most twice as many at a time
        (100.0, 9, 8),  # not known well enough
        (float("inf"), 10, 8),  # noise hides the gradient
    ],
)
def test_to_what_a_batch_grows(noise_scale: float, looks: int, batch: int) -> None:
    made, shard = growth()
    assert next_batch(made, shard, noise_scale, looks) == batch
    assert len(shard.own) == batch // 8, "pieces of each worker"


def test_a_batch_never_shrinks_and_has_at_most_the_whole_training_set() -> None:
    made, shard = growth(num_samples=30)
    assert [next_batch(made, shard, scale, 10) for scale in (100.0, 100.0)] == [16, 24]
    made._watch.noise = NoiseScale(steps=10, sum_of_gradient=1.0, sum_of_noise=0.1)
    assert shard.global_batch_size == 24


def test_each_sample_counts_once_an_epoch_though_the_batch_grows_within() -> None:
    found = pt.simulate(job(), s.sync_sgd(), 3, batch_growth=pt.training.norm_test(theta=0.5, every=2), seed=SEED)
    plain = pt.simulate(job(), s.sync_sgd(), 3, seed=SEED)
    assert found.samples == plain.samples == 1200
    assert found.steps < plain.steps


def test_rows_of_metrics_have_the_batch_and_what_it_grew_by(tmp_path: Path) -> None:
    pt.simulate(job(), s.sync_sgd(), 3, batch_growth="norm_test(theta=0.5, every=2)", out=tmp_path, seed=SEED)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    batches = [row["global_batch_size"] for row in rows if row["kind"] == "train"]
    assert batches[0] == 12
    assert batches[-1] > 12
    assert batches == sorted(batches)
    assert all("noise_trace" in row for row in rows[1:] if row["kind"] == "train")


@pytest.mark.parametrize(
    ("strategy", "workers", "more", "said"),
    [
        (s.sync_sgd(), 1, {}, "PT1506.*leave batch_growth out"),
        (s.codistillation(groups=2), 4, {}, "PT1518"),
        (s.downpour(), 2, {}, "PT1511"),
        (s.sync_sgd(), 2, {"noise_scale": 8}, "leave out noise_scale=8"),
    ],
)
def test_what_cannot_be_tested_is_refused(strategy: pt.Strategy, workers: int, more: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pt.simulate(job(), strategy, workers, batch_growth=pt.training.norm_test(), **more)


def test_the_rule_travels_as_text() -> None:
    there = RunSpec.of(find("digits"), s.sync_sgd(), 2, pt.RunOptions(batch_growth="norm_test(0.3)"))
    assert RunSpec.from_json(there.to_json(), find).options.batch_growth == pt.training.norm_test(theta=0.3)


def test_both_estimates_stay_apart_in_what_is_saved() -> None:
    made, shard = growth()
    made._watch.noise.add(Squares(2.0, 6.0))
    other, _ = growth()
    other.restore(made.saved(), 5, shard)
    assert other._watch.noise == made._watch.noise
    assert other._watch.noise.mean == pytest.approx((2.0, 6.0))
