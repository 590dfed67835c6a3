"""Batches that are windows into rows which all ranks of a process share."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from polytempo.data.shard import DataShard
from polytempo.data.source import Gathered


def shards(data: TensorDataset, gathered: Gathered | None, *, shuffle: bool) -> list[DataShard]:
    return [
        DataShard(data, rank=rank, size=5, batch_size=300, seed=3, shuffle=shuffle, gathered=gathered)
        for rank in range(5)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_see_the_same_batches_with_it_and_without(shuffle: bool) -> None:
    """9,001 samples: batches in blocks of 4,096 rows or across two, and smaller last ones."""
    data = TensorDataset(torch.arange(9001.0), torch.arange(18002).reshape(-1, 2))
    for one, other in zip(shards(data, Gathered(), shuffle=shuffle), shards(data, None, shuffle=shuffle), strict=True):
        for _ in range(3):  # epochs
            for batch, expected in zip(one, other, strict=True):
                assert all(map(torch.equal, batch, expected))


def test_data_that_are_seen_in_turns_are_not_mixed_up() -> None:
    gathered = Gathered()
    order = torch.tensor([2, 0, 1])
    one, other = (torch.tensor([1.0, 2.0, 3.0]),), (torch.tensor([4.0, 5.0, 6.0]),)
    assert gathered.batch(one, order, 0, 0, 2)[0].tolist() == [3.0, 1.0]
    assert gathered.batch(other, order, 0, 0, 2)[0].tolist() == [6.0, 4.0]
    assert gathered.batch(one, order.flip(0), 1, 0, 2)[0].tolist() == [2.0, 1.0]
    assert gathered.batch(one, order, 0, 2, 3)[0].tolist() == [2.0]


def test_a_stand_in_has_memory_of_its_own() -> None:
    """Ranks without a sample of their own get a copy of the first."""
    data, gathered = TensorDataset(torch.arange(6.0)), Gathered()
    found = []
    for rank in range(4):
        shard = DataShard(data, rank=rank, size=4, batch_size=1, seed=0, shuffle=False, gathered=gathered)
        shard.load_state_dict({"seed": 0, "epoch": 0, "consumed": 4, "num_samples": 6})
        found += [batch[0] for batch in shard]
    assert [each.tolist() for each in found] == [[4.0], [5.0], [4.0], [4.0]]
    found[2].add_(1)
    assert found[0].tolist() == [4.0]
