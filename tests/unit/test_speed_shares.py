"""Parts of a global batch by speed: literal tables, and laws over random speeds."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from polytempo.data.plan import apportioned, own_picks, part
from polytempo.data.shard import DataShard
from polytempo.data.speed_shares import ALIKE, LEAST, MOST, MOST_MOVED, next_shares, step_seconds


def test_shares_that_are_equal_cut_as_no_shares_do() -> None:
    for size in range(1, 9):
        for num_samples in range(1, 40):
            for rank in range(size):
                assert part(num_samples, size, rank, (3,) * size) == part(num_samples, size, rank)


@pytest.mark.parametrize(
    ("num_samples", "shares", "parts"),
    [
        (7, (3, 1), (5, 2)),
        (128, (37, 37, 36, 18), (37, 37, 36, 18)),
        (64, (37, 37, 36, 18), (19, 18, 18, 9)),  # an epoch's last batch, in the same proportion
        (3, (37, 37, 36, 18), (1, 1, 1, 0)),  # fewer samples than ranks: the last rank has a stand-in
        (4, (9, 1, 1, 1), (1, 1, 1, 1)),  # a part would be empty
    ],
)
def test_a_batch_is_cut_in_proportion(num_samples: int, shares: tuple[int, ...], parts: tuple[int, ...]) -> None:
    assert apportioned(num_samples, shares) == parts


def test_micro_batches_are_as_many_on_all_ranks() -> None:
    found = [[pick.num_samples for pick in own_picks(0, [16], 2, [rank], 4, (13, 3))] for rank in range(2)]
    assert found == [[5, 4, 4], [1, 1, 1]]  # the smaller part has three samples


def test_one_slow_rank_of_four() -> None:
    parts, seconds = (32, 32, 32, 32), (1.0, 1.0, 1.0, 2.0)
    told = []
    for _ in range(4):
        parts = next_shares(parts, seconds)
        told.append((parts, step_seconds(parts, seconds)))
    assert told == [((35, 35, 34, 24), 48.0), *[((37, 37, 36, 18), 37.0)] * 3]  # 128 / 3.5 = 36.6
    for _ in range(2):
        parts = next_shares(parts, (1.0, 1.0, 1.0, 1.0))
    assert parts == (32, 32, 32, 32)


def test_one_rank_alone_keeps_its_batch() -> None:
    assert next_shares((8,), (3.0,)) == (8,)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_sums_and_the_end_of_any_speeds(seed: int) -> None:
    draw = random.Random(seed)
    size, each = draw.randint(2, 12), draw.randint(4, 300)
    seconds = [draw.uniform(0.2, 3.0) for _ in range(size)]
    total, parts = size * each, (each,) * size
    for _ in range(12):
        before, parts = parts, next_shares(parts, seconds)
        assert sum(parts) == total
        assert all(LEAST * each - 1 < part < MOST * each + 1 for part in parts), (seed, parts)
        moved = max(abs(after - part) for after, part in zip(parts, before, strict=True))
        assert moved <= max(1.0, MOST_MOVED * each) + 1, (seed, before, parts)
        assert step_seconds(parts, seconds) <= step_seconds(before, seconds) or parts == (each,) * size
    assert parts == next_shares(parts, seconds), f"seed {seed}: it goes on changing"
    if max(seconds) > (1 + ALIKE) * min(seconds):
        assert step_seconds(parts, seconds) < step_seconds((each,) * size, seconds)
    for _ in range(12):
        parts = next_shares(parts, [1.0] * size)
    assert parts == (each,) * size


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_with_costs_of_each_step_comes_back_too(seed: int) -> None:
    """A small part then looks slower a sample, though its rank is as fast as the others."""
    draw = random.Random(seed)
    parts = tuple(draw.randint(24, 40) for _ in range(3))
    parts = (*parts, 128 - sum(parts))
    for _ in range(20):
        parts = next_shares(parts, [(part + 20) / part for part in parts])
    assert parts == (32, 32, 32, 32), f"seed {seed}"


def _epoch(shards: list[DataShard], deals: dict[int, tuple[int, ...] | None]) -> list[list[list[int]]]:
    """Each step's places by rank; `deals`: shares that hold after so many steps."""
    steps: list[list[list[int]]] = []
    for number, batches in enumerate(zip(*shards, strict=True), start=1):
        steps.append([batch[0].tolist() for batch in batches])
        for shard in shards if number in deals else ():
            shard.deal(deals[number])
    return steps


@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_each_sample_once_whenever_parts_change(kind: str) -> None:
    data = TensorDataset(torch.arange(103))
    source = data if kind == "tensors" else DataLoader(torch.utils.data.ConcatDataset([data]), batch_size=4)
    shards = [DataShard(source, rank=rank, size=3, batch_size=4, shuffle=True) for rank in range(3)]
    steps = _epoch(shards, {2: (6, 4, 2), 3: (5, 4, 3), 5: None, 7: (2, 4, 6)})
    assert [[len(part) for part in step] for step in steps] == [
        *[[4, 4, 4]] * 2,
        [6, 4, 2],
        *[[5, 4, 3]] * 2,
        *[[4, 4, 4]] * 2,
        [2, 4, 6],
        [1, 2, 4],  # the rest of the epoch
    ]
    flat = [sample for step in steps for part in step for sample in part]
    assert sorted(flat) == list(range(103))
    equal = [DataShard(data, rank=rank, size=3, batch_size=4) for rank in range(3)]
    assert flat == [sample for step in _epoch(equal, {}) for part in step for sample in part]  # the order stays
    assert [shard.taken for shard in shards] == [sum(len(step[rank]) for step in steps) for rank in range(3)]


def test_shares_of_pieces_and_of_micro_batches() -> None:
    shards = [DataShard(TensorDataset(torch.arange(48)), rank=rank, size=2, batch_size=4) for rank in range(2)]
    for shard in shards:
        shard.grow(24, pieces=2)
        shard.deal((16, 8))
    assert [[len(batch[0]) for batch in shard] for shard in shards] == [[8, 8, 8, 8], [4, 4, 4, 4]]


def test_a_saved_position_keeps_its_shares_for_as_many_balanced_ranks() -> None:
    data = TensorDataset(torch.arange(40))
    shard = DataShard(data, rank=1, size=2, batch_size=5)
    shard.deal((7, 3))
    saved = shard.state_dict()
    assert saved["shares"] == [7, 3]
    for size, balanced, shares in ((2, True, (7, 3)), (2, False, None), (4, True, None)):
        other = DataShard(data, rank=1, size=size, batch_size=5)
        other.balanced = balanced
        other.load_state_dict(saved)
        assert other.shares == shares
    assert "shares" not in DataShard(data, rank=1, size=2, batch_size=5).state_dict()


def test_wrong_shares_are_refused() -> None:
    shard = DataShard(TensorDataset(torch.arange(40)), rank=0, size=2, batch_size=5)
    for wrong in ((1,), (1, 2, 3), (1, 0)):
        with pytest.raises(ValueError, match="give 2 whole numbers from 1"):
            shard.deal(wrong)


def test_shares_of_slices_are_whole_slices() -> None:
    """Samples and slices stay as they are, whichever rank has them; None is each rank's subtree."""
    data = TensorDataset(torch.arange(40))
    ranks = [DataShard(data, rank=rank, size=3, global_batch_size=20, slices=8, shuffle=False) for rank in range(3)]
    assert [list(shard.own) for shard in ranks] == [[0, 1], [2, 3], [4, 5, 6, 7]]
    taken = []
    for shard in ranks:
        batches = iter(shard)
        first = [next(batches)[0].tolist() for _ in shard.own]
        shard.deal((1, 5, 2))
        taken.append((first, [batch[0].tolist() for batch in batches]))
        assert shard.epoch == 1
    assert [list(shard.own) for shard in ranks] == [[0], [1, 2, 3, 4, 5], [6, 7]]
    assert ranks[0].parts == (1, 5, 2)
    for step in (0, 1):
        slices = [batch for each in taken for batch in each[step]]
        assert [len(batch) for batch in slices] == [3, 3, 3, 3, 2, 2, 2, 2]
        assert [place for batch in slices for place in batch] == list(range(20 * step, 20 * step + 20))
    ranks[1].deal(None)
    assert list(ranks[1].own) == [2, 3]
