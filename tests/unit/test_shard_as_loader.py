"""`pt.shard(loader)` answers a script's calls of a loader, so that its other lines stay the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import polytempo as pt
from polytempo import jobs
from polytempo.data import digits
from polytempo.training.own_loop.shard import WorldShard
from polytempo.worlds import ProcessWorld

NUMBERS = TensorDataset(torch.arange(11.0), torch.arange(11))


class Stream(IterableDataset[int]):
    """Five samples."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Loader(DataLoader[Any]):
    """One of a library, with more to ask for."""

    name = "mine"

    def doubled(self) -> int:
        return 2 * len(self.dataset)  # type: ignore[arg-type]


def part(source: Any, rank: int = 1, **options: Any) -> WorldShard:
    """The part of rank 1 of two."""
    return pt.shard(source, world=ProcessWorld(rank, [0, 0]), **options)


def samples(shard: WorldShard) -> list[int]:
    return [int(y) for _, target in shard for y in target]


def test_it_has_whatever_the_loader_has() -> None:
    loader = Loader(NUMBERS, batch_size=2, shuffle=True, num_workers=1, prefetch_factor=5, timeout=7)
    shard = part(loader)
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn", "name"):
        assert getattr(shard, name) is getattr(loader, name)
    for name in ("batch_size", "num_workers", "prefetch_factor", "timeout", "drop_last", "pin_memory"):
        assert getattr(shard, name) == getattr(loader, name)
    assert (len(shard.dataset), len(shard.sampler), shard.doubled()) == (11, 11, 22)


@pytest.mark.parametrize("source", [NUMBERS, Stream()], ids=["data set", "stream"])
def test_memory_is_pinned_where_there_is_an_accelerator(source: Any) -> None:
    """Torch warns where there is none, and a warning is an error here."""
    loader: DataLoader[Any] = DataLoader(source, batch_size=2, pin_memory=True)
    for batch in part(loader):
        tensors = [batch] if isinstance(batch, torch.Tensor) else batch
        assert all(tensor.is_pinned() == torch.accelerator.is_available() for tensor in tensors)
    job = replace(jobs.find("digits"), data=lambda folder: pt.Data(DataLoader(digits().train, 8, pin_memory=True)))
    assert pt.simulate(job, "sync_sgd", 2, steps=2).steps == 2


def test_the_lines_that_scripts_log_are_those_of_the_loader() -> None:
    shard = part(DataLoader(NUMBERS, batch_size=2))
    lines = [
        f"[{index * len(target)}/{len(shard.dataset)} ({100.0 * index / len(shard):.0f}%)] {shard.batch_size}"
        for index, (_, target) in enumerate(shard)
    ]
    assert lines == ["[0/11 (0%)] 2", "[2/11 (33%)] 2", "[2/11 (67%)] 2"]


def test_what_shard_was_told_goes_before_what_the_loader_says() -> None:
    shard = part(DataLoader(NUMBERS, batch_size=2), batch_size=3)
    assert (shard.batch_size, len(shard)) == (3, 2)


def test_a_data_set_answers_as_the_plain_loader_of_it() -> None:
    shard = part(NUMBERS, batch_size=4)
    assert shard.dataset is NUMBERS
    assert type(shard.sampler) is RandomSampler
    assert type(part(NUMBERS, batch_size=4, shuffle=False).sampler) is SequentialSampler
    assert (shard.batch_size, shard.num_workers, shard.drop_last) == (4, 0, False)
    stream = Stream()
    assert part(stream, batch_size=2).dataset is stream


def test_what_neither_has_is_named() -> None:
    shard = part(DataLoader(NUMBERS, batch_size=2))
    with pytest.raises(AttributeError, match=r"neither pt.shard\(…\) nor the DataLoader in it.*'batchsize'"):
        _ = shard.batchsize
    assert not hasattr(shard, "_iterator")
    assert getattr(shard, "drop_first", "none") == "none"


def test_a_copy_of_a_shard_is_a_shard() -> None:
    shard = part(DataLoader(NUMBERS, batch_size=2))
    assert copy.copy(shard).dataset is NUMBERS
    with pytest.raises(AttributeError, match="'inner'"):
        _ = WorldShard.__new__(WorldShard).inner


def test_set_epoch_goes_to_its_start_but_leaves_the_position_within_it() -> None:
    shard, fresh = (part(DataLoader(NUMBERS, batch_size=2, shuffle=True)) for _ in range(2))
    epochs = [samples(fresh) for _ in range(3)]
    shard.set_epoch(2)
    assert (shard.epoch, samples(shard)) == (2, epochs[2])
    shard.set_epoch(1)
    batches = iter(shard)
    next(batches)
    del batches
    shard.set_epoch(1)
    assert samples(shard) == epochs[1][2:]
    shard.set_epoch(0)
    assert samples(shard) == epochs[0]


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_an_epoch_that_is_none_is_refused(epoch: Any) -> None:
    with pytest.raises(ValueError, match=f"the epoch is {epoch}; epochs are whole numbers"):
        part(NUMBERS, batch_size=2).set_epoch(epoch)


def distributed(shuffle: bool = True) -> DataLoader[Any]:
    """A loader as scripts for DDP make it."""
    sampler: DistributedSampler[Any] = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=shuffle)
    return DataLoader(NUMBERS, batch_size=2, sampler=sampler)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_is_taken_for_its_shuffle_and_every_sample_comes_once(shuffle: bool) -> None:
    plain = part(NUMBERS, batch_size=2, shuffle=shuffle)
    loader = distributed(shuffle)
    assert samples(part(loader)) == samples(plain)
    both = samples(part(distributed(shuffle), rank=0)) + samples(part(distributed(shuffle), rank=1))
    assert sorted(both) == list(range(11))


def test_set_epoch_of_a_distributed_sampler_is_followed() -> None:
    plain = part(NUMBERS, batch_size=2)
    epochs = [samples(plain) for _ in range(4)]
    shard = part(distributed())
    seen = []
    for epoch in (0, 1, 3):  # the script went on from a checkpoint of its own
        shard.sampler.set_epoch(epoch)
        seen.append(samples(shard))
    assert seen == [epochs[0], epochs[1], epochs[3]]
    resumed = part(distributed())
    resumed.load_state_dict({"seed": 0, "epoch": 2, "consumed": 4, "num_samples": 11})
    resumed.sampler.set_epoch(2)
    assert samples(resumed) == epochs[2][2:]
