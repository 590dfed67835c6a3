"""`sync_sgd(route=invariant)`: the same bits for any number of workers, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import polytempo as pt
from helpers import exchanged, values
from polytempo.collectives import invariant
from polytempo.core.arithmetic.slice_tree import along_tree
from polytempo.data.shard import DataShard
from polytempo.jobs import find

INVARIANT = pt.strategies.sync_sgd(route=invariant(slices=8))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """107 samples with noise that is drawn when they are read."""

    def __len__(self) -> int:
        return 107

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index / 107, 1.0]) + 0.1 * torch.randn(2)
        return x, x[:1].sin()


def job(body: Callable[[], nn.Module] = lambda: nn.Dropout(0.3), dtype: torch.dtype = torch.float32) -> pt.Job:
    """A small regression with `body` in its middle, Adam and a schedule."""
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(2, 6), body(), nn.Linear(6, 1)).to(dtype),
        data=lambda path: pt.Data(Noisy()),
        loss=pt.of_batch(lambda model, batch: ((model(batch[0].to(dtype)) - batch[1].to(dtype)) ** 2).mean()),
        optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * steps),
        lr=0.01,
        epochs=2,
    )


def hashes(job: pt.Job, workers: tuple[int, ...]) -> set[str | None]:
    """The hashes of the final parameters, by number of workers."""
    results = [pt.simulate(job, INVARIANT, n, global_batch_size=20) for n in workers]
    assert len({(result.steps, result.samples) for result in results}) == 1
    return {result.parameters_sha256 for result in results}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_dropout_and_a_last_batch_that_is_smaller(dtype: torch.dtype) -> None:
    """107 samples by 20: five whole batches, and 7 that join the last of them because a slice would be empty."""
    workers = (1, 2, 3, 4, 7, 8) if dtype == torch.float32 else (1, 3, 8)
    assert len(hashes(job(dtype=dtype), workers)) == 1


def test_a_parameter_without_a_gradient_is_not_decayed() -> None:
    """As in plain torch, where its gradient is None."""
    spares: list[tuple[nn.Parameter, Tensor]] = []

    class Spare(nn.Identity):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3))
            spares.append((self.spare, self.spare.detach().clone()))

    decaying = replace(
        job(Spare), optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=0.5)
    )
    pt.simulate(decaying, INVARIANT, 2, global_batch_size=20, steps=3)
    assert spares
    assert all(torch.equal(after, before) for after, before in spares)


def test_another_global_batch_and_other_slices_are_other_bits() -> None:
    found = [pt.simulate(job(), INVARIANT, 2, global_batch_size=size, steps=4) for size in (16, 24)]
    found += [pt.simulate(job(), pt.strategies.sync_sgd(invariant(slices=4)), 2, global_batch_size=16, steps=4)]
    assert len({each.parameters_sha256 for each in found}) == 3


def test_the_mean_is_that_of_the_other_routes() -> None:
    """Equal to rounding: shares, also of slices of different sizes, are right."""
    quiet = replace(find("digits"), batch_size=21)
    first, second = (
        pt.simulate(quiet, strategy, 3, global_batch_size=61, steps=30)
        for strategy in (INVARIANT, pt.strategies.sync_sgd(pt.collectives.ring))
    )
    assert first.loss == pytest.approx(second.loss, rel=1e-4)
    assert first.parameters_sha256 != second.parameters_sha256


def test_a_checkpoint_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    calm = pt.simulate(find("digits"), INVARIANT, 1, global_batch_size=64, steps=12)
    pt.simulate(find("digits"), INVARIANT, 4, global_batch_size=64, steps=7, out=tmp_path, checkpoint_every=7)
    world = pt.Trainer(find("digits"), INVARIANT, global_batch_size=64, steps=12, out=tmp_path, resume=True).fit()
    assert world.parameters_sha256 == calm.parameters_sha256


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_the_route_adds_in_the_order_of_the_tree(num_ranks: int) -> None:
    for numel in (0, 3, 64):
        outcome = exchanged(invariant(slices=9), num_ranks, numel)
        expected = along_tree(num_ranks, lambda rank, numel=numel: values(rank, numel), Tensor.add)
        assert all(torch.equal(result, expected) for result in outcome.results if result is not None)


def test_slices_do_not_depend_on_the_number_of_ranks() -> None:
    def dealt(size: int) -> list[list[list[int]]]:
        found: list[list[list[int]]] = []
        for rank in range(size):
            given = DataShard(TensorDataset(torch.arange(43)), rank=rank, size=size, global_batch_size=10, slices=5)
            mine = [batch[0].tolist() for batch in given]
            assert given.consumed == 0
            assert given.epoch == 1
            steps = [mine[i : i + len(given.own)] for i in range(0, len(mine), len(given.own))]
            found = steps if rank == 0 else [a + b for a, b in zip(found, steps, strict=True)]
        return found

    one = dealt(1)
    assert [sum(map(len, step)) for step in one] == [10, 10, 10, 13]  # 3 samples are too few for 5 slices
    assert all(dealt(size) == one for size in range(2, 6))


def test_the_same_data_by_another_rank_keeps_batches_and_slices() -> None:
    shard = DataShard(TensorDataset(torch.arange(40)), rank=0, size=2, global_batch_size=20, slices=4)
    other = shard.at(rank=2, size=4)
    assert (other.global_batch_size, other.batch_size, list(other.own), len(other)) == (20, 5, [2], 2)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (lambda: nn.BatchNorm1d(6), "running statistics of BatchNorm1d '1' would depend on a worker's slices"),
        (lambda: nn.utils.spectral_norm(nn.Linear(6, 6)), "buffer '1.weight_u' changes in each of them"),
    ],
)
def test_what_keeps_something_from_batch_to_batch_is_refused(body: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pt.simulate(job(body), INVARIANT, 2, global_batch_size=16, steps=1)


def test_what_is_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 8 workers, and there are 9; use route=invariant\(slices=16\)"):
        pt.simulate(job(), INVARIANT, 9)
    with pytest.raises(ValueError, match="a global batch of 6 samples cannot be dealt to 8 slices"):
        pt.simulate(job(), INVARIANT, 2, global_batch_size=6)
    with pytest.raises(ValueError, match="a global batch of 3 samples cannot be dealt to 4 workers"):
        pt.simulate(job(), pt.strategies.sync_sgd(), 4, global_batch_size=3)
    with pytest.raises(ValueError, match="batch_size=4 is of each worker, and global_batch_size=8 of all together"):
        pt.RunOptions(batch_size=4, global_batch_size=8)
    with pytest.raises(ValueError, match="PT1521"):
        pt.simulate(job(), pt.strategies.downpour(), 2, global_batch_size=8)
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="PT1101"):
        pt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), INVARIANT)
    with pytest.raises(ValueError, match="route"):
        pt.parse_strategy("local_sgd(route=invariant)")
    with pytest.raises(ValueError, match="slices must be at least 1, got 0"):
        invariant(slices=0)
    with pytest.raises(ValueError, match="has gradients by rows; use sparse=False"):
        pt.simulate(job(lambda: nn.Sequential(nn.Tanh(), _Table())), INVARIANT, 2, steps=1)


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.zeros(len(x), dtype=torch.int64))


def test_its_price_is_the_rings() -> None:
    found = pt.explain(INVARIANT, 4, 1000)
    assert found.at(1) == pt.explain(pt.strategies.sync_sgd(pt.collectives.ring), 4, 1000).at(1)
    assert str(INVARIANT) == "sync_sgd(route=invariant(slices=8))"
    assert str(pt.parse_strategy("sync_sgd(route=invariant)")) == str(INVARIANT)


def test_a_global_batch_is_kept_by_other_strategies() -> None:
    """30 samples by 4 workers: 8, 8, 7 and 7."""
    result = pt.simulate(job(), pt.strategies.local_sgd(), 4, global_batch_size=30, steps=2)
    assert (result.samples, result.batch_size) == (60, 8)
    loader = DataLoader(Noisy(), batch_size=3)
    assert DataShard(loader, rank=3, size=4, global_batch_size=30).batch_size == 8
