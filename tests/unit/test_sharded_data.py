"""`ShardedData` as a map-style data set: samples by their numbers, in any order, each shard read once a batch."""

from __future__ import annotations

import pickle

import pytest
from torch.utils.data import DataLoader

from polytempo import data
from polytempo.data.streams.sharded_data import InMemoryShards


def _shards(*counts: int) -> InMemoryShards:
    numbers = iter(range(sum(counts)))
    return InMemoryShards([[next(numbers) for _ in range(count)] for count in counts])


def test_samples_have_numbers_shard_after_shard() -> None:
    shards = _shards(3, 0, 4)
    assert len(shards) == 7
    assert list(shards) == list(range(7))
    assert shards.__getitems__([6, 0, 3, 3]) == [6, 0, 3, 3]
    assert shards[2] == 2
    with pytest.raises(IndexError):
        shards[7]


def test_a_data_loader_takes_it() -> None:
    batches = DataLoader(_shards(3, 4), batch_size=3, shuffle=True)
    assert sorted(number for batch in batches for number in batch.tolist()) == list(range(7))


def test_a_fingerprint_tells_names_and_counts_apart() -> None:
    assert _shards(3, 4).fingerprint == pickle.loads(pickle.dumps(_shards(3, 4))).fingerprint
    others = [_shards(4, 3), data.InMemoryShards([[0] * 3, [0] * 4], names=["a", "b"])]
    assert len({shards.fingerprint for shards in [_shards(3, 4), *others]}) == 3


def test_the_order_is_a_setting_of_the_value() -> None:
    shards = _shards(3, 4)
    assert (shards.in_order().reading.shuffle, shards.reading.shuffle) == (False, None)
    assert shards.shuffled(buffer=40, interleave=2).reading.window == 20
    with pytest.raises(ValueError, match="buffer=0"):
        shards.shuffled(buffer=0)
