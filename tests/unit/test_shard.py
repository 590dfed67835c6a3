"""`DataShard`: every sample once an epoch, with any number of workers and stops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from polytempo.data.plan import permutation, plan, slices
from polytempo.data.shard import DataShard
from some_cases import examples


def numbers(count: int) -> TensorDataset:
    """Samples (i, 10 * i)."""
    return TensorDataset(torch.arange(count), 10 * torch.arange(count))


class Numbers(Dataset[tuple[int, int]]):
    """The same samples, made one by one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 10 * index


class Stream(IterableDataset[tuple[int, int]]):
    """The same samples, one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((i, 10 * i) for i in range(self.count))


def inputs(batch: list[Tensor]) -> list[int]:
    """The samples of a batch, after checking that targets belong to inputs."""
    x, y = batch
    assert torch.equal(y, 10 * x)
    return x.tolist()


def test_the_remainder_rule_by_table() -> None:
    #      samples, consumed, size, batch_size: global batches of the rest of the epoch
    table = {
        (12, 0, 2, 3): [6, 6],  # no remainder
        (11, 0, 2, 2): [4, 4, 3],  # a smaller last batch: 2 + 1
        (9, 0, 2, 2): [4, 5],  # one sample cannot be dealt to two ranks: 3 + 2
        (10, 0, 2, 2): [4, 4, 2],
        (3, 0, 2, 8): [3],  # less than one global batch
        (2, 0, 2, 8): [2],
        (7, 0, 1, 3): [3, 3, 1],
        (14, 0, 4, 3): [14],  # 12 + 2
        (11, 4, 2, 2): [4, 3],  # goes on as it began
        (9, 4, 2, 2): [5],
        (9, 9, 2, 2): [],  # the end of an epoch
        (11, 8, 4, 2): [3],  # more ranks than samples left
    }
    assert {case: plan(*case) for case in table} == table


def test_slices_by_table() -> None:
    table = {
        (6, 2): [(0, 3), (3, 6)],
        (7, 3): [(0, 3), (3, 5), (5, 7)],
        (5, 2): [(0, 3), (3, 5)],
        (3, 3): [(0, 1), (1, 2), (2, 3)],
        (4, 1): [(0, 4)],
        (2, 3): [(0, 1), (1, 2), (2, 2)],
    }
    assert {case: slices(*case) for case in table} == table


@given(num_samples=st.integers(1, 300), size=st.integers(1, 9), batch_size=st.integers(1, 9))
def test_a_plan_uses_every_sample_and_gives_every_rank_one(num_samples: int, size: int, batch_size: int) -> None:
    batches = plan(num_samples, 0, size, batch_size)
    assert sum(batches) == num_samples
    assert all(batch == size * batch_size for batch in batches[:-1])
    if num_samples >= size:
        assert all(stop > start for batch in batches for start, stop in slices(batch, size))
    for done in range(len(batches)):
        assert plan(num_samples, sum(batches[:done]), size, batch_size) == batches[done:]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    assert permutation(10, 0, 0).tolist() == permutation.__wrapped__(10, 0, 0).tolist()
    assert sorted(permutation(10, 0, 0).tolist()) == list(range(10))
    assert len({tuple(permutation(10, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}) == 25


def test_ranks_have_contiguous_slices_of_one_order() -> None:
    order = permutation(11, 7, 0).tolist()
    dealt = [[inputs(b) for b in DataShard(numbers(11), rank=rank, size=2, batch_size=2, seed=7)] for rank in range(2)]
    assert dealt == [[order[0:2], order[4:6], order[8:10]], [order[2:4], order[6:8], order[10:11]]]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_every_sample_comes_once_an_epoch_however_often_a_run_stops(data: st.DataObject) -> None:
    """Stretches of a few steps, each with its own number of workers, passed on as saved JSON."""
    num_samples = data.draw(st.integers(1, 60), "num_samples")
    kind = data.draw(st.sampled_from([numbers, Numbers, Stream]), "kind")
    batch_size = data.draw(st.integers(1, 5), "batch_size")
    source, saved, epoch = kind(num_samples), None, 0
    seen: list[Counter[int]] = [Counter(), Counter(), Counter()]
    while epoch < 2:
        size = data.draw(st.integers(1, min(num_samples, 6)), "size")
        shards = [DataShard(source, rank=rank, size=size, batch_size=batch_size, seed=5) for rank in range(size)]
        for shard in shards:
            if saved is not None:
                shard.load_state_dict(json.loads(saved))
        stop_after = data.draw(st.integers(1, 8), "stop_after")
        for step, batches in enumerate(zip(*shards, strict=True), start=1):  # strict: equal numbers of steps
            assert sum(shard.local_samples for shard in shards) == shards[0].global_samples
            assert sum(shard.share or 0 for shard in shards) == pytest.approx(1)
            for shard, batch in zip(shards, batches, strict=True):
                assert len(inputs(batch)) == max(shard.local_samples, 1)
                seen[shard.epoch].update(inputs(batch)[: shard.local_samples])
            if step == stop_after:
                break
        states = [shard.state_dict() for shard in shards]
        assert all(state == states[0] for state in states)
        saved, epoch = json.dumps(states[0]), shards[0].epoch
    assert seen[:2] == [Counter(range(num_samples))] * 2


@pytest.mark.parametrize("kind", [numbers, Numbers, Stream])
def test_a_state_saved_after_the_last_step_goes_on_with_the_next_epoch(kind: type[Numbers]) -> None:
    shard = DataShard(kind(6), rank=0, size=1, batch_size=3)
    batches = iter(shard)
    next(batches), next(batches)
    assert shard.state_dict()["consumed"] == 6
    resumed = DataShard(kind(6), rank=1, size=2, batch_size=3)
    resumed.load_state_dict(shard.state_dict())
    assert list(resumed) == []
    assert (resumed.epoch, resumed.consumed) == (1, 0)
    assert len(list(resumed)) == 1


def test_more_workers_than_samples_left_get_a_stand_in_that_counts_nothing() -> None:
    """5 samples, 4 of them used up by one worker; three workers go on."""
    first = DataShard(numbers(5), rank=0, size=1, batch_size=4, shuffle=False)
    next(iter(first))
    ranks = [first.at(rank=rank, size=3) for rank in range(3)]
    assert [[inputs(batch) for batch in shard] for shard in ranks] == [[[4]], [[4]], [[4]]]
    assert [shard.share for shard in ranks] == [1, 0, 0]


def test_counts_and_shares_of_uneven_batches() -> None:
    shard = DataShard(numbers(11), rank=1, size=2, batch_size=2)
    assert shard.share is None
    seen = [(shard.local_samples, shard.global_samples, shard.share, shard.consumed) for _ in shard]
    expected: list[tuple[int, int, float | None, int]] = [(2, 4, 1 / 2, 4), (2, 4, 1 / 2, 8), (1, 3, 1 / 3, 11)]
    assert seen == expected


def test_length_is_steps_of_a_whole_epoch() -> None:
    shard = DataShard(numbers(11), rank=0, size=2, batch_size=2)
    next(iter(shard))
    assert len(shard) == 3
    with pytest.raises(TypeError, match="a stream"):
        len(DataShard(Stream(11), rank=0, size=2, batch_size=2))


def test_tensors_in_memory_give_what_a_loader_gives() -> None:
    fast = DataShard(numbers(11), rank=1, size=2, batch_size=2, seed=3)
    slow = DataShard(Numbers(11), rank=1, size=2, batch_size=2, seed=3)
    assert [list(map(torch.Tensor.tolist, b)) for b in fast] == [list(map(torch.Tensor.tolist, b)) for b in slow]


def test_a_subset_of_tensors_is_read_as_fast() -> None:
    rows = Subset(Subset(numbers(10), [9, 7, 5, 3, 1]), [0, 2, 4])
    shard = DataShard(rows, rank=0, size=1, batch_size=3, shuffle=False)
    assert [inputs(batch) for batch in shard] == [[9, 5, 1]]
    assert shard._tensors is not None


def test_a_batch_in_memory_may_be_overwritten() -> None:
    dataset = numbers(4)
    for x, _ in DataShard(dataset, rank=0, size=1, batch_size=4, shuffle=False):
        x.zero_()
    assert dataset.tensors[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_keeps_its_batch_size_order_and_collate_fn(shuffle: bool) -> None:
    loader = DataLoader(Numbers(6), batch_size=2, shuffle=shuffle, collate_fn=lambda samples: [s[0] for s in samples])
    order = permutation(6, 0, 0).tolist() if shuffle else list(range(6))
    dealt = [list(DataShard(loader, rank=rank, size=2)) for rank in range(2)]
    assert dealt == [[order[0:2], order[4:5]], [order[2:4], order[5:6]]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_keeps_its_worker_processes_and_the_position_stays_exact(persistent: bool) -> None:
    loader = DataLoader(Numbers(20), batch_size=2, num_workers=1, prefetch_factor=4, persistent_workers=persistent)
    shard = DataShard(loader, rank=0, size=2)
    batches = iter(shard)
    assert [inputs(next(batches)), inputs(next(batches))] == [[0, 1], [4, 5]]
    assert shard.consumed == 8
    del batches
    assert [inputs(batch) for batch in shard] == [[8, 9], [12, 13], [16, 17]]
    assert [inputs(batch) for batch in shard] == [[0, 1], [4, 5], [8, 9], [12, 13], [16, 17]]


def test_a_loader_over_a_stream_keeps_its_collate_fn() -> None:
    loader = DataLoader(Stream(7), batch_size=2, collate_fn=lambda samples: [s[0] for s in samples])
    assert [list(DataShard(loader, rank=rank, size=2)) for rank in range(2)] == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_data_smaller_than_the_number_of_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="3 samples cannot be dealt to 4 workers"):
        DataShard(numbers(3), rank=0, size=4, batch_size=2)
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"{count} samples cannot be dealt to 4 workers"):
            list(DataShard(Stream(count), rank=0, size=4, batch_size=2))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(Numbers(4), sampler=WeightedRandomSampler([1, 1, 1, 1], 4)),
            r"WeightedRandomSampler.*shuffle=True",
        ),
        (DataLoader(Numbers(4), sampler=RandomSampler(Numbers(4), replacement=True)), "every sample must come once"),
        (DataLoader(Numbers(4), sampler=RandomSampler(Numbers(4), num_samples=2)), "every sample must come once"),
        (DataLoader(Numbers(4), batch_sampler=[[0, 1], [2, 3]]), r"batch_sampler is a list.*shard\(loader.dataset"),
        (DataLoader(Numbers(4), batch_size=None), "batch_size=None"),
    ],
)
def test_a_loader_with_an_order_of_its_own_is_refused_with_the_remedy(loader: DataLoader[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataShard(loader, rank=0, size=2)


def test_a_plain_batch_sampler_is_no_order_of_its_own() -> None:
    sampler = BatchSampler(SequentialSampler(Numbers(4)), batch_size=2, drop_last=False)
    with pytest.raises(ValueError, match="batch_size=None"):  # torch does not tell the loader its batch size
        DataShard(DataLoader(Numbers(4), batch_sampler=sampler), rank=0, size=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "size": 2, "batch_size": 1}, "rank is 2 of 2"),
        ({"rank": 0, "size": 0, "batch_size": 1}, "rank is 0 of 0"),
        ({"rank": 0, "size": 1}, "needs a batch_size"),
        ({"rank": 0, "size": 1, "batch_size": 0}, "batch_size is 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataShard(numbers(4), **arguments)


def test_a_stream_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match="cannot be shuffled"):
        DataShard(Stream(4), rank=0, size=1, batch_size=1, shuffle=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "saved position has seed=1, this run has seed=0"),
        ({"num_samples": 7}, "saved position has num_samples=7, this run has num_samples=6"),
        ({"consumed": 7}, "consumed=7 of 6 samples; it is damaged"),
        ({"epoch": -1}, "epoch=-1"),
    ],
)
def test_a_state_of_other_data_or_seed_is_refused(change: dict[str, int | None], message: str) -> None:
    shard = DataShard(numbers(6), rank=0, size=1, batch_size=2)
    with pytest.raises(ValueError, match=message):
        shard.load_state_dict(shard.state_dict() | change)
