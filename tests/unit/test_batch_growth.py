"""Batches that grow: each sample once an epoch, the mean gradient of all pieces, schedules by epochs, resumed bits."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cli.options.command_options import given_options
from polytempo.data.shard import DataShard
from polytempo.jobs import find
from polytempo.large_batch import dynamic_batch, falling, schedule
from polytempo.spec.batch_growth import parse_growth
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.growth import grow, grown

s = pt.strategies
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).sin()


def job(**more: Any) -> pt.Job:
    return pt.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
            "data": lambda folder: pt.Data(TensorDataset(X, Y)),
            "loss": nn.functional.mse_loss,
            "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
            "batch_size": 4,
            "lr": 0.05,
            "epochs": 4,
            **more,
        }
    )


def spec(workers: int, **options: Any) -> RunSpec:
    return RunSpec.of(job(), s.sync_sgd(), workers, pt.RunOptions(**options))


@pytest.mark.parametrize(
    ("epoch", "batch"),
    [(0, (8, 1)), (1, (8, 1)), (2, (24, 3)), (3, (24, 3)), (5, (36, 5)), (6, (50, 7))],
)
def test_the_batch_of_each_epoch(epoch: int, batch: tuple[int, int]) -> None:
    """Two workers with 4 samples each, 50 in all: a batch is at most all of them, a piece at most 4 of each worker."""
    assert grown(spec(2, batch_growth={2: 3, 5: 1.5, 6: 2}), 2, 50, epoch) == batch


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_counts_once_an_epoch_before_and_after_a_batch_has_grown(size: int) -> None:
    """Also where it grows within an epoch, and goes on elsewhere from a saved position."""
    shards = [DataShard(TensorDataset(torch.arange(50)), rank=rank, size=size, batch_size=4) for rank in range(size)]
    run = spec(size, batch_growth={1: 3, 2: 5})
    for epoch in range(4):
        seen: list[int] = []
        for shard in shards:
            grow(run, shard)
            if epoch == 0:
                batches = iter(shard)
                seen += next(batches)[0].tolist()
                del batches
                assert shard.consumed == 4 * size
                shard.grow(12 * size, 3)
                saved = shard.state_dict()
                shard.load_state_dict(saved)
            seen += chain.from_iterable(batch[0].tolist() for batch in shard)
        assert sorted(seen) == list(range(50)), (size, epoch)


def test_a_worker_s_pieces_make_the_gradient_of_its_batch() -> None:
    """Plain torch on the whole batches gives the same; in float64 to the last digits."""
    torch.set_default_dtype(torch.float64)
    try:
        double = job(data=lambda folder: pt.Data(TensorDataset(X.double(), Y.double())))
        trainer = pt.Trainer(double, batch_growth={1: 3, 2: 2}, epochs=4)
        trainer.fit()
        torch.manual_seed(0)
        net = double.model()
        optimizer = double.optimizer(net.parameters(), 0.05)
        plain = DataShard(TensorDataset(X.double(), Y.double()), rank=0, size=1, batch_size=4)
        for batch in (4, 12, 24, 24):
            plain.grow(batch)
            for x, y in plain:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert trainer.context.replica.step == 12 + 4 + 2 + 2
    for mine, other in zip(trainer.model.parameters(), net.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-12, atol=0)


def test_a_schedule_goes_by_epochs_whatever_the_batch() -> None:
    rates: list[float] = []

    def watched(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        optimizer.register_step_pre_hook(lambda o, a, k: rates.append(o.param_groups[0]["lr"]))
        return optimizer

    pt.Trainer(job(optimizer=watched, schedule=schedule(falling([2, 3]))), batch_growth={1: 3}, epochs=4).fit()
    assert rates == pytest.approx([0.05] * (12 + 4) + [0.005] * 4 + [0.0005] * 4)


def test_a_run_that_is_resumed_after_its_batch_has_grown_has_the_same_bits(tmp_path: Path) -> None:
    """Saved within an epoch of larger batches, with a schedule."""
    made = job(schedule=schedule(falling([3])))
    options: dict[str, Any] = {"batch_growth": {1: 2, 2: 2}}
    whole = pt.Trainer(made, epochs=4, **options).fit()
    pt.Trainer(made, steps=15, checkpoint_every=15, out=tmp_path, **options).fit()
    resumed = pt.Trainer(made, epochs=4, resume=True, out=tmp_path, **options).fit()
    assert resumed.parameters_sha256 == whole.parameters_sha256
    assert resumed.samples == whole.samples == 192


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.top_k_sgd(0.1), s.local_sgd(period=3)], ids=str)
def test_batches_grow_with_any_strategy_whose_workers_meet(strategy: pt.Strategy) -> None:
    """Epochs of 48 samples in steps of 8, 16 and 32."""
    result = pt.simulate(job(), strategy, 2, epochs=3, batch_growth={1: 2, 2: 2})
    assert (result.steps, result.samples) == (6 + 3 + 2, 144)


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (s.downpour(), {}, "PT1511"),
        (s.gpipe(stages=2, micro_batches=2), {}, "PT1513"),
        (s.hogwild(), {}, "PT1514"),
        (s.sync_sgd(), {"meta": True, "steps": 3}, "PT1318"),
    ],
)
def test_what_cannot_grow_is_refused_by_name(strategy: pt.Strategy, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pt.simulate(job(), strategy, 2, batch_growth={1: 2}, **options)


def test_growth_on_the_command_line() -> None:
    assert parse_growth("5:4, 10:2") == {5: 4, 10: 2}
    assert given_options({"batch_growth": "norm_test(0.3)"}).run["batch_growth"] == pt.training.norm_test(theta=0.3)
    assert given_options({"batch_growth": "5:4,10:2.5"}).run["batch_growth"] == {5: 4.0, 10: 2.5}
    for wrong in ("5", "5:", "a:2", "5:-2", "norm_test(theta=0)", "norm(1)"):
        with pytest.raises(ValueError, match="--batch-growth"):
            given_options({"batch_growth": wrong})
    with pytest.raises(ValueError, match="must be a whole number >= 1 as a key"):
        pt.RunOptions(batch_growth={0: 2})


def test_growth_travels_with_a_run() -> None:
    there = RunSpec.of(find("digits"), s.sync_sgd(), 2, pt.RunOptions(batch_growth={5: 4}))
    assert RunSpec.from_json(there.to_json(), find).options.batch_growth == {5: 4}


def test_dynamic_sampling_asks_for_the_batch_that_passes_its_test() -> None:
    assert dynamic_batch(32, noise_scale=100, theta=0.5) == 400
    assert dynamic_batch(500, noise_scale=100, theta=0.5) == 500
    assert dynamic_batch(32, noise_scale=float("inf")) == 32


def test_a_loop_s_own_shard_grows() -> None:
    shard = pt.shard(TensorDataset(X), batch_size=8)
    sizes = [[len(x) for (x,) in shard]]
    shard.grow(24)
    sizes.append([len(x) for (x,) in shard])
    assert sizes == [[8] * 6, [24] * 2]
