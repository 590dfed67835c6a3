"""Ranks that average now and then, and are lost in between: each sample of an epoch counts exactly once."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from polytempo.data.sample_account import SampleAccount, SamplesLost
from polytempo.data.shard import DataShard
from polytempo.data.spans import PlaceSpan, num_places, without
from polytempo.training.elastic.local_round import LocalRound, met

SEEDS, EPOCHS = 60, 4


class OneByOne(Dataset[int]):
    """Numbers that are not in a tensor, so that a loader reads them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Storm:
    """Rounds of 1 to 6 ranks, some of them broken off, until all epochs are over. `used`: how often a sample counted.

    `forgets`: the places of lost ranks are not dealt again, which must be found.
    """

    def __init__(self, seed: int, *, forgets: bool = False) -> None:
        self.random, self.forgets, self.seed = random.Random(seed), forgets, seed
        self.count, self.batch = self.random.randint(30, 70), self.random.randint(6, 12)
        self.data: Any = TensorDataset(torch.arange(self.count)) if seed % 2 else OneByOne(self.count)
        self.used = [[0] * self.count for _ in range(EPOCHS)]
        self.account = SampleAccount(self.count)
        self.shard = self.dealt_to(0, 1)

    def run(self) -> None:
        """Run to the end and close the account."""
        while not over(self.shard):
            self.round(self.random.randint(1, 6), self.random.randint(1, 9))
        self.account.check(self.shard.epoch, self.shard.consumed, self.shard.left)

    def dealt_to(self, rank: int, size: int) -> DataShard:
        return DataShard(self.data, rank=rank, size=size, global_batch_size=self.batch, seed=self.seed)

    def round(self, size: int, period: int) -> None:
        """All make `period` steps, or some are lost before that, and the others stop somewhere."""
        place = self.shard.state_dict()
        lost = [rank for rank in range(size) if self.random.random() < 0.2]
        survivors: list[tuple[LocalRound, list[tuple[int, int]]]] = []
        for rank in range(size):
            steps = self.random.randint(0, period) if lost else period
            found = self.stepped(self.dealt_to(rank, size), place, steps)
            survivors += [] if rank in lost else [found]
        if not survivors:
            return
        after = met(place, json.loads(json.dumps([each.to_plain() for each, _ in survivors]))).place
        if self.forgets:
            after.pop("left", None)
        for each, samples in survivors:
            self.account.add(each.counted(place, after))
            for epoch, sample in samples:
                self.used[epoch][sample] += 1
        self.shard.load_state_dict(json.loads(json.dumps(after)))

    def stepped(self, shard: DataShard, place: Any, steps: int) -> tuple[LocalRound, list[tuple[int, int]]]:
        """One rank's steps, and the epochs and numbers of its samples."""
        shard.load_state_dict(place)
        made, samples = LocalRound(place=place), list[tuple[int, int]]()
        while made.steps < steps and not over(shard):
            for batch in shard:
                made.stepped(shard.spans, shard.state_dict())
                numbers = (batch[0] if isinstance(batch, list) else batch).tolist()
                for span in shard.spans:
                    samples += [(span.epoch, numbers.pop(0)) for _ in range(span.size)]
                if made.steps == steps or over(shard):
                    break
        return made, samples


def over(shard: DataShard) -> bool:
    """True if a run of so many epochs ends here."""
    assert shard.num_samples is not None
    left = shard.consumed - num_places(shard.left)
    return shard.epoch + left / shard.num_samples >= EPOCHS


def test_each_sample_counts_once_whoever_is_lost() -> None:
    for seed in range(SEEDS):
        storm = Storm(seed)
        try:
            storm.run()
            assert storm.used == [[1] * storm.count] * EPOCHS
        except (AssertionError, ValueError, SamplesLost) as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_places_that_are_not_dealt_again_are_missed() -> None:
    with pytest.raises(SamplesLost, match="exactly once"):
        Storm(1, forgets=True).run()


def test_a_place_that_was_used_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="was used twice"):
        without([PlaceSpan(0, 0, 9)], [PlaceSpan(0, 2, 5), PlaceSpan(0, 4, 6)])
    with pytest.raises(ValueError, match="was not there"):
        without([PlaceSpan(0, 0, 9)], [PlaceSpan(1, 2, 5)])


def test_lost_places_are_dealt_first_and_batches_do_not_mix() -> None:
    shard = DataShard(TensorDataset(torch.arange(10)), rank=0, size=1, batch_size=3, shuffle=False)
    place = {"seed": 0, "epoch": 1, "consumed": 7, "num_samples": 10, "left": [[0, 1, 3], [1, 4, 6]]}
    shard.load_state_dict(place)
    assert [batch[0].tolist() for batch in shard] == [[1, 2, 4], [5], [7, 8, 9]]
    assert (shard.epoch, shard.consumed, shard.left) == (2, 0, [])
    shard.load_state_dict(place)
    iterator = iter(shard)
    next(iterator)
    assert shard.spans == [PlaceSpan(0, 1, 3), PlaceSpan(1, 4, 5)]
    assert shard.state_dict() == place | {"left": [[1, 5, 6]]}
