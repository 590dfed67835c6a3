"""Data sets side by side: steps are plain torch's on the joined batches, for any number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import polytempo as pt
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import permutation
from polytempo.data.side_by_side import SideBySide

LABELLED, UNLABELLED, GROUPS, STEPS, BATCH, LR = 7, 30, 10, 7, 5, 0.05
"""An epoch of 10 groups ends in step 2."""


def sets(seed: int | None = 0) -> SideBySide:
    draw = torch.Generator().manual_seed(3)
    x, y, z = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((7, 4), (7, 1), (30, 4)))
    return pt.data.side_by_side(
        {"labelled": TensorDataset(x, y), "unlabelled": TensorDataset(z)}, {"unlabelled": 3}, seed=seed
    )


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    (x, y), (z,) = batch["labelled"], batch["unlabelled"]
    return (model(x) - y).square().mean() + 0.3 * (model(z) - model(z + 0.1)).square().mean()


def plain() -> dict[str, Tensor]:
    data, model = sets(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        epoch, at = divmod(step, GROUPS // BATCH)
        numbers = permutation(GROUPS, 0, epoch).tolist()[at * BATCH : (at + 1) * BATCH]
        optimizer.zero_grad()
        loss(model, data.collate([data[number] for number in numbers])).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(("workers", "accumulate"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_steps_are_those_of_the_joined_batches(workers: int, accumulate: int, tmp_path: Path) -> None:
    job = pt.Job(
        model=net,
        data=lambda path: pt.Data(sets(), collate=sets().collate),
        loss=pt.of_batch(loss),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=LR,
    )
    given: dict[str, Any] = {"global_batch_size": BATCH, "accumulate": accumulate, "steps": STEPS}
    found = pt.simulate(job, "sync_sgd", workers, out=tmp_path / "run", checkpoint_every=STEPS, **given)
    assert found.steps == STEPS
    trained = pt.training.trained_model(job, tmp_path / "run").model.state_dict()
    for name, tensor in plain().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-12)


def test_an_epoch_has_each_sample_of_the_longest_once_and_others_again() -> None:
    data = sets()
    assert (len(data), {name: len(found) for name, found in data[0].items()}) == (10, {"labelled": 1, "unlabelled": 3})
    seen = {
        name: Counter(sample[0].sum().item() for group in map(data.__getitem__, range(10)) for sample in group[name])
        for name in data[0]
    }
    assert sorted(seen["unlabelled"].values()) == [1] * 30
    assert sorted(seen["labelled"].values()) == [1] * 4 + [2] * 3
    in_order = [data[0]["labelled"][0][0] for data in (sets(None), sets(1), sets(2))]
    assert len({tuple(each.tolist()) for each in in_order}) > 1
    batch = next(iter(pt.shard(DataLoader(data, batch_size=4, shuffle=True, collate_fn=data.collate))))
    assert (batch["labelled"][0].shape, batch["unlabelled"][0].shape) == ((4, 4), (12, 4))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(1)


@pytest.mark.parametrize("other", [Stream(), pt.data.InMemoryShards([[1.0, 2.0]])])
def test_streams_and_data_in_shards_are_refused(other: Any) -> None:
    with pytest.raises(Incompatible, match="PT2612"):
        pt.data.side_by_side({"a": TensorDataset(torch.ones(3)), "b": other})


@pytest.mark.parametrize("sizes", [{"c": 1}, {"a": 0}])
def test_wrong_sizes_are_named(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give whole numbers from 1 for a, b"):
        pt.data.side_by_side({"a": TensorDataset(torch.ones(3)), "b": TensorDataset(torch.ones(2))}, sizes)
    with pytest.raises(ValueError, match="have samples each"):
        pt.data.side_by_side({"a": TensorDataset(torch.ones(0))})


@pytest.mark.parametrize("make", [lambda a, b: (a, b), lambda a, b: [a, b], lambda a, b: {"a": a, "b": b}])
def test_several_data_sets_in_place_of_one_are_refused_with_the_remedy(make: Any) -> None:
    several = make(TensorDataset(torch.ones(3)), DataLoader(TensorDataset(torch.ones(3)), batch_size=1))
    with pytest.raises(Incompatible, match=r"PT2611.*side_by_side"):
        pt.shard(several, batch_size=1)
    job = pt.Job(
        model=net,
        data=lambda path: pt.Data(several),
        loss=pt.of_batch(loss),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )
    with pytest.raises(ValueError, match=r"side_by_side"):
        pt.simulate(job, "sync_sgd", 1, steps=1)
