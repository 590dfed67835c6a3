"""`ElasticSampler`: each sample counts once an epoch under any change of the group; ranks make equally many steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.horovod.torch.elastic import ElasticSampler
from some_cases import examples

GROUPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=4)


def batches(sampler: ElasticSampler, batch_size: int) -> Iterator[list[int]]:
    """A DataLoader without worker processes asks for one batch at a time."""
    indices = iter(sampler)
    while batch := list(islice(indices, batch_size)):
        yield batch


def group_of(size: int, state: str, num_samples: int) -> list[ElasticSampler]:
    """The samplers of a new group, all with one state."""
    made = [ElasticSampler(range(num_samples), seed=3) for _ in range(size)]
    for rank, sampler in enumerate(made):
        sampler.load_state_dict(json.loads(state))
        sampler.deal_to(rank, size)
    return made


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 50), st.integers(1, 6), GROUPS)
def test_each_sample_counts_once_over_losses_and_joins(
    num_samples: int, batch_size: int, groups: list[tuple[int, int, bool]]
) -> None:
    used: Counter[int] = Counter()
    state, last = json.dumps(ElasticSampler(range(num_samples)).state_dict()), (1, 0)
    for size, num_steps, loses in [*groups, (groups[-1][0], num_samples + 1, False)]:
        samplers = group_of(size, state, num_samples)
        loaders = [batches(sampler, batch_size) for sampler in samplers]
        for step in range(num_steps):
            dealt = [next(loader, None) for loader in loaders]
            if None in dealt:
                assert dealt == [None] * size, "all ranks make the same number of steps"
                break
            if loses and step == num_steps - 1:
                break  # the step is undone: no rank records it
            last = (size, len(samplers[0].remaining_indices))
            used.update(index for batch in dealt if batch for index in batch)
            for sampler in samplers:
                sampler.record_batch(step, batch_size)
        assert len({str(sampler.state_dict()) for sampler in samplers}) == 1, "all know all processed samples"
        state = json.dumps(samplers[-1].state_dict())
        assert set(samplers[0].processed_indices) == set(used)
    assert set(used) == set(range(num_samples))
    size, left = last
    repeats = used.total() - num_samples
    assert repeats <= size - 1
    if left > batch_size * size and left % (batch_size * size) not in range(1, size):
        assert repeats == 0, "no sample twice, but where some ranks would have a batch less"


def test_a_position_is_where_to_go_back() -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.deal_to(0, 2)
    sampler.record_batch(0, 2)
    committed = sampler.position()
    sampler.record_batch(1, 2)
    assert sorted(sampler.processed_indices) == list(range(8))
    sampler.go_to(committed)
    sampler.deal_to(1, 2)
    assert sorted(sampler.processed_indices) == [0, 1, 2, 3]
    assert list(sampler) == [5, 7, 9]
    assert len(sampler) == 3
    assert sampler.get_indices(1, 2) == [9]


def test_indices_that_one_rank_has_recorded_are_told_in_a_commit() -> None:
    sampler = ElasticSampler(range(6), shuffle=False)
    sampler.record_indices([4])
    assert sampler.recorded_alone == {4}
    sampler.recorded_by_all([4, 5])
    assert (sampler.recorded_alone, sampler.processed_indices) == (frozenset(), {4, 5})
    sampler.reset()
    assert list(sampler) == [0, 1, 2, 3]
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_indices": []}


def test_the_number_of_processed_samples_and_a_state_of_horovods_sampler() -> None:
    """Horovod notes how many samples have been processed; our state says which."""
    sampler = ElasticSampler(range(20), seed=3)
    sampler.set_epoch(2)
    sampler.deal_to(0, 2)
    order = list(sampler.remaining_indices)
    sampler.record_batch(0, 4)
    assert sampler.processed_num == 8
    other = ElasticSampler(range(20), seed=3)
    other.load_state_dict({"epoch": 2, "processed_num": 8})
    assert other.state_dict() == sampler.state_dict() == {"epoch": 2, "processed_indices": sorted(order[:8])}
    assert other.remaining_indices == order[8:]
    sampler.set_epoch(3)
    assert sampler.processed_num == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_epochs_have_other_orders_and_seeds_too(seed: int) -> None:
    sampler = ElasticSampler(range(20), seed=seed)
    first = list(sampler)
    sampler.set_epoch(1)
    assert sorted(first) == sorted(sampler) == list(range(20))
    assert first != list(sampler) != list(ElasticSampler(range(20), seed=seed + 2))
