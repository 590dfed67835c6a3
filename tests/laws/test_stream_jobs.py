"""Jobs on data in shards: each sample once an epoch by every strategy, and the gradients of plain torch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.data.shard import DataShard

SAMPLES, EPOCHS, BATCH = 53, 2, 4
PROBED = 2
"""Samples of the pass that a step's cost is taken from."""
X = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def shards() -> pt.data.ShardedData:
    """Samples (input, number) in five files, one of them empty."""
    samples = [(X[number], torch.tensor(float(number), dtype=torch.float64)) for number in range(SAMPLES)]
    files = [samples[start:stop] for start, stop in pairwise([0, 9, 9, 30, 31, SAMPLES])]
    return pt.data.InMemoryShards(files).shuffled(buffer=14, interleave=2)


def job(seen: list[int] | None = None, **more: Any) -> pt.Job:
    """A regression. `seen` collects the numbers of the samples that are trained on."""

    def loss(output: Tensor, number: Tensor) -> Tensor:
        if seen is not None and output.requires_grad:
            seen.extend(int(each) for each in number)
        return ((output.squeeze(1) - number.sin()) ** 2).mean()

    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(),
        data=lambda path: pt.Data(shards(), shards().in_order()),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.5),
        lr=0.05,
        batch_size=BATCH,
        **more,
    )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("sync_sgd", {}),
        ("sync_sgd", {"accumulate": 2}),
        ("sync_sgd", {"batch_growth": {1: 2.0}}),
        ("sync_sgd(route=invariant(slices=4))", {}),
        ("local_sgd(period=3)", {}),
        ("top_k_sgd(ratio=0.1)", {}),
        ("gossip", {}),
        ("gpipe(stages=2)", {"workers": 4}),
        ("downpour", {}),
        ("ssp(bound=2)", {}),
        ("backup_workers(backups=1)", {}),
        ("async_sgd", {}),
    ],
)
def test_each_sample_is_trained_on_once_an_epoch(strategy: str, options: dict[str, Any]) -> None:
    seen: list[int] = []
    result = pt.simulate(job(seen), strategy, **{"workers": 3, "epochs": EPOCHS, **options})
    counts = Counter(seen)
    counts.subtract([*range(SAMPLES)] * EPOCHS)
    assert min(counts.values()) == 0
    assert counts.total() == PROBED, "samples that were trained on more often"
    assert result.samples == SAMPLES * EPOCHS


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_step_is_the_joined_batchs_of_plain_torch(workers: int) -> None:
    """The batches of all lanes joined, in a loop without Polytempo, to 1e-12."""
    found = pt.simulate(job(), "sync_sgd", workers=workers, epochs=EPOCHS, seed=7)
    plain, made = _plain(workers), job()
    assert found.loss == pytest.approx(made.loss(plain(X), torch.arange(SAMPLES).double()).item(), abs=1e-12)


def _plain(workers: int) -> nn.Module:
    made = job()
    torch.manual_seed(7)
    model = made.model()
    optimizer = made.optimizer(model.parameters(), made.lr)
    ranks = [DataShard(shards(), rank=rank, size=workers, batch_size=BATCH, seed=7) for rank in range(workers)]
    for _ in range(EPOCHS):
        for batches in zip(*ranks, strict=True):
            inputs, numbers = (torch.cat([batch[place] for batch in batches]) for place in (0, 1))
            optimizer.zero_grad()
            made.loss(model(inputs), numbers).backward()
            optimizer.step()
    return model


def test_batched_simulation_has_the_same_numbers() -> None:
    more: dict[str, Any] = {"workers": 3, "epochs": 1}
    one, other = (pt.simulate(job(), "local_sgd(period=3)", batched=batched, **more) for batched in (False, True))
    assert one.loss == pytest.approx(other.loss, abs=1e-12)
    assert one.seconds == other.seconds
