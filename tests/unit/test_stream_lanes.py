"""Data in shards, dealt in lanes: each sample once for any workers and stops, and the data read once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from polytempo.data.batches import Batches
from polytempo.data.sample_account import SampleAccount, counted_by_epoch
from polytempo.data.shard import DataShard
from polytempo.data.spans import PlaceSpan
from polytempo.data.streams.lanes import Lanes
from polytempo.data.streams.order import StreamOrder
from polytempo.data.streams.sharded_data import InMemoryShards, ShardedData
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.training.elastic.local_round import LocalRound, met
from some_cases import examples


def numbers(*counts: int) -> InMemoryShards:
    """The samples 0, 1, …, cut into shards of these sizes."""
    following = iter(range(sum(counts)))
    return InMemoryShards([[next(following) for _ in range(count)] for count in counts])


class Blocks(ShardedData):
    """Numbers in files of blocks that are read whole. `read_rows` counts the rows read, `opened` the files."""

    def __init__(self, counts: Sequence[int], block: int) -> None:
        self.counts, self.names = list(counts), [f"file {number}" for number in range(len(counts))]
        self.block, self.read_rows, self.opened = block, 0, 0

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[int]:
        """The samples; each block that has some is read once."""
        self.opened += 1
        held = -1
        for run in runs:
            for row in run:
                if row // self.block != held:
                    held = row // self.block
                    self.read_rows += min(self.block, self.counts[shard] - held * self.block)
                yield self.ends[shard] - self.counts[shard] + row


def shards_of(data: Any, size: int, batch_size: int = 3, **more: Any) -> list[DataShard]:
    """All ranks' shards."""
    return [DataShard(data, rank=rank, size=size, batch_size=batch_size, seed=5, **more) for rank in range(size)]


def steps_of(shards: Sequence[DataShard], most: int | None = None) -> list[list[list[int]]]:
    """The samples of each rank in each step, of all steps that are left of the epoch, or of the first ones."""
    found: list[list[list[int]]] = []
    iterators = [iter(shard) for shard in shards]
    while most is None or len(found) < most:
        step = [next(each, None) for each in iterators]
        if step[0] is None:
            assert step == [None] * len(shards)
            break
        counts = [shard.local_samples for shard in shards]
        found.append([batch.tolist()[:count] for batch, count in zip(step, counts, strict=True)])
    return found


def seen(steps: list[list[list[int]]]) -> list[int]:
    """All samples in ascending order."""
    return sorted(sample for step in steps for batch in step for sample in batch)


def resumed(shards: Sequence[DataShard], size: int) -> list[DataShard]:
    """Other ranks at the same position, which went through JSON."""
    states = [json.dumps(shard.state_dict()) for shard in shards]
    assert len(set(states)) == 1, "the position is the same on all ranks"
    others = shards_of(shards[0]._given, size, shards[0].batch_size)
    for other in others:
        other.load_state_dict(json.loads(states[0]))
    return others


@settings(max_examples=examples(60), deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 5),
    size=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    buffer=st.integers(1, 40),
    interleave=st.integers(1, 3),
)
def test_an_epoch_has_each_sample_once_in_the_steps_of_a_map_style_data_set(
    counts: list[int], size: int, batch_size: int, buffer: int, interleave: int
) -> None:
    data = numbers(*counts).shuffled(buffer=buffer, interleave=interleave)
    steps = steps_of(shards_of(data, size, batch_size))
    assert seen(steps) == list(range(len(data)))
    plain = steps_of(shards_of(list(range(len(data))), size, batch_size))
    assert [[len(batch) for batch in step] for step in steps] == [[len(batch) for batch in step] for step in plain]


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    interleave=st.integers(1, 3),
)
def test_an_epoch_that_is_stopped_and_goes_on_with_other_workers_has_each_sample_once(
    sizes: list[int], stops: list[int], interleave: int
) -> None:
    data = numbers(17, 0, 40, 5, 23).shuffled(buffer=24, interleave=interleave)
    shards, steps = shards_of(data, sizes[0]), []
    for size, stop in zip(sizes[1:], stops, strict=False):
        steps += steps_of(shards, stop) if shards[0].epoch == 0 else []
        shards = resumed(shards, size)
    steps += steps_of(shards) if shards[0].epoch == 0 else []
    assert seen(steps) == list(range(85))
    assert seen(steps_of(shards)) == list(range(85)), "the epoch after it is whole, too"


@pytest.mark.parametrize("interleave", [1, 2, 3])
@pytest.mark.parametrize("stop", range(1, 8))
def test_as_many_workers_go_on_with_the_same_batches(interleave: int, stop: int) -> None:
    data = numbers(17, 40, 28).shuffled(buffer=24, interleave=interleave)
    whole, shards = steps_of(shards_of(data, 3)), shards_of(data, 3)
    assert steps_of(shards, stop) + steps_of(resumed(shards, 3)) == whole


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("files", [3, 40])
def test_workers_together_read_the_data_once(size: int, files: int) -> None:
    """Rows that can be read one by one are read once; of blocks a few are read by two workers."""
    rows = 12_000 // files
    data = Blocks([rows] * files, block=1)
    assert seen(steps_of(shards_of(data, size, 16))) == list(range(12_000))
    assert data.read_rows == 12_000
    blocks = Blocks([rows] * files, block=10).shuffled(buffer=120, interleave=2)
    steps_of(shards_of(blocks, size, 16))
    assert blocks.read_rows <= 1.1 * 12_000
    assert blocks.opened <= files + 4 * size


def test_a_worker_opens_each_file_once() -> None:
    data = Blocks([100] * 8, block=1).shuffled(buffer=60, interleave=1)
    shards = shards_of(data, 2, 10)
    steps_of(shards[:1])
    assert data.opened <= 5


def test_without_shuffling_places_are_rows_and_nothing_is_held() -> None:
    data = numbers(5, 0, 4).in_order()
    assert steps_of(shards_of(data, 1, 4)) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8]]]
    two = DataShard(numbers(5, 0, 4), rank=0, size=1, batch_size=9, shuffle=False)
    assert steps_of([two]) == [[list(range(9))]]


def test_the_order_is_of_seed_and_epoch_and_mixes_a_window() -> None:
    data = numbers(50, 50).shuffled(buffer=50, interleave=1)
    rows = []
    for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]:
        windows = StreamOrder(data, seed, epoch, window=50).windows(0, 100)
        rows.append([int(row) for window in windows for row in window.rows])
    assert rows[0] == rows[1]
    assert len(set(map(tuple, rows))) == 3
    assert sorted(rows[0][:50]) == list(range(50)) != rows[0][:50]


@pytest.mark.parametrize("processes", [1, 2])
def test_worker_processes_change_no_batch(processes: int) -> None:
    data = numbers(40, 30).shuffled(buffer=16, interleave=2)
    plain = steps_of(shards_of(data, 2))
    loader = DataLoader(data, batch_size=3, num_workers=processes)
    shards = shards_of(loader, 2, 3, shuffle=True)
    assert steps_of(shards, 5) + steps_of(shards) == plain
    assert steps_of(shards) == steps_of(_second_epoch(data))


def _second_epoch(data: ShardedData) -> list[DataShard]:
    shards = shards_of(data, 2)
    for shard in shards:
        shard.set_epoch(1)
    return shards


def test_slices_do_not_depend_on_the_workers() -> None:
    data = numbers(40, 30).shuffled(buffer=16, interleave=2)
    found = {}
    for size in (1, 2, 4):
        shards = shards_of(data, size, 8, slices=4, global_batch_size=8)
        steps = [list(iter(shard)) for shard in shards]
        own = [len(shard.own) for shard in shards]
        count = len(steps[0]) // own[0]
        found[size] = [
            [batch.tolist() for rank in range(size) for batch in steps[rank][step * own[rank] : (step + 1) * own[rank]]]
            for step in range(count)
        ]
    assert found[1] == found[2] == found[4]
    assert sorted(sample for step in found[1] for part in step for sample in part) == list(range(70))


def test_micro_batches_are_parts_of_the_same_batches() -> None:
    data = numbers(40, 30).shuffled(buffer=16, interleave=2)
    whole = [batch.tolist() for batch in shards_of(data, 2, 4)[1]]
    shard = shards_of(data, 2, 4, micro_batches=2)[1]
    parts: list[list[int]] = [[]]
    for batch in shard:
        parts[-1] += batch.tolist()
        parts += [] if shard.following else [[]]
    assert parts[:-1] == whole


def test_a_batch_that_grows_and_parts_by_speed_deal_the_rest_again() -> None:
    data = numbers(60, 50).shuffled(buffer=24, interleave=2)
    shards = shards_of(data, 2, 4)
    steps = steps_of(shards, 3)
    for shard in shards:
        shard.grow(12)
    steps += steps_of(shards, 2)
    for shard in shards:
        shard.deal((5, 1))
    rest = steps_of(shards)
    assert [len(batch) for batch in rest[0]] == [10, 2]
    assert seen(steps + rest) == list(range(110))


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_workers_of_a_server_read_the_data_once(workers: int) -> None:
    data = Blocks([400] * 12, block=1).shuffled(buffer=160, interleave=4)
    batches = [Batches(copy(data), size=workers, batch_size=10, seed=5) for _ in range(workers)]
    readers = [each._source.dataset for each in batches]
    scheduler = BatchScheduler(len(batches[0]), len(batches[0]), "freely", workers, run=batches[0].run)
    held: dict[int, list[int]] = {worker: [] for worker in range(workers)}
    found: list[int] = []
    for worker in held:
        scheduler.join(worker, 0)
    draw, asked = Random(3), 0
    while not scheduler.finished:
        worker, asked = draw.randrange(workers), asked + 1
        deal = scheduler.ask(worker, 0, asked, held[worker])
        held[worker] = []
        for each in [*([] if deal is None else [deal]), *scheduler.due()]:
            for ticket in each.tickets:
                held[each.worker].append(ticket.number)
                found += batches[each.worker].at(ticket.epoch, ticket.batch).tolist()
    assert sorted(found) == list(range(4800))
    assert sum(each.read_rows for each in readers) <= 1.1 * 4800


@pytest.mark.parametrize("lost", [0, 2])
def test_the_account_holds_when_a_worker_is_lost_with_its_samples(lost: int) -> None:
    """A story: three workers make two steps in step, two more on their own, and one is lost with these."""
    data = numbers(20, 31).shuffled(buffer=12, interleave=2)
    shards, account = shards_of(data, 3, 4), SampleAccount(51)
    iterators = [iter(shard) for shard in shards]
    begin = shards[0].state_dict()
    rounds = [LocalRound() for _ in shards]
    for _ in range(3):
        for each, shard, round_ in zip(iterators, shards, rounds, strict=True):
            next(each)
            round_.stepped(shard.spans, shard.state_dict())
    living = [each for rank, each in enumerate(rounds) if rank != lost]
    place = met(begin, [each.to_plain() for each in living]).place
    for lived in living:
        account.add(lived.counted(begin, place))
    account.check(place["epoch"], place["consumed"], [PlaceSpan(*span) for span in place["left"]])
    others = shards_of(data, 2, 4)
    for other in others:
        other.load_state_dict(place)
    for other in others:
        for _ in other:
            account.add(counted_by_epoch(other.spans, [0]))
    account.check(1, 0)


def test_more_workers_than_samples_left_have_stand_ins() -> None:
    data = numbers(5, 6).in_order()
    shards = shards_of(data, 2, 4)
    steps_of(shards, 1)
    shards = resumed(shards, 5)
    assert [len(batch) for batch in steps_of(shards)[0]] == [1, 1, 1, 0, 0]


def test_lanes_as_a_table() -> None:
    lanes = Lanes([PlaceSpan(0, 0, 24)], global_batch_size=4, parts=2, interleave=2)
    picks = [list(lanes.between(pick.start, pick.stop)[0][1:]) for _, pick in lanes.picks([0])]
    assert picks == [[0, 2], [6, 8], [2, 4], [8, 10], [4, 6], [10, 12]]
    assert lanes.left(3) == [PlaceSpan(0, 8, 12), PlaceSpan(0, 4, 6), PlaceSpan(0, 20, 24), PlaceSpan(0, 16, 18)]
    assert [lanes.num_left(steps) for steps in (0, 3, 6)] == [24, 12, 0]


def test_a_position_of_other_data_or_another_order_is_refused() -> None:
    data = numbers(20, 20).shuffled(buffer=8)
    state = shards_of(data, 1)[0].state_dict()
    for other in (data.shuffled(buffer=16), data.in_order(), numbers(10, 30).shuffled(buffer=8)):
        with pytest.raises(ValueError, match="order="):
            shards_of(other, 1)[0].load_state_dict(state)


def test_a_shard_that_is_shorter_than_its_count_is_named() -> None:
    data = InMemoryShards([[0, 1, 2], [3, 4]])
    data.read = lambda shard, runs: iter([0])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"shard-\d ended after 1 of"):
        list(DataShard(data, rank=0, size=1, batch_size=2))
