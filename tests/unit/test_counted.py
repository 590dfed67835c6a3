"""`counted`: streams that are read once become data in shards, with the guarantees of these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import IterableDataset

import polytempo as pt
from polytempo.data.shard import DataShard
from polytempo.training.job.context import check_length


class Numbers(IterableDataset[int]):
    """The numbers of a range, in pieces, as Hugging Face's streams are. `opened` counts the readings."""

    def __init__(self, numbers: range, num_shards: int = 1) -> None:
        self.numbers, self.num_shards, self.opened = numbers, num_shards, 0

    def shard(self, num_shards: int, index: int) -> Numbers:
        """Every `num_shards`-th number."""
        return Numbers(self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        return iter(self.numbers)


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        (Numbers(range(50), num_shards=4), [13, 13, 12, 12]),
        ([Numbers(range(20)), Numbers(range(20, 50))], [20, 30]),
        ([[*range(50)]], [50]),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_is_dealt_each_sample_once(source: object, counts: list[int], size: int) -> None:
    data = pt.data.counted(source)
    assert list(data.counts) == counts
    ranks = [DataShard(data, rank=rank, size=size, batch_size=4) for rank in range(size)]
    assert sorted(number for rank in ranks for batch in rank for number in batch.tolist()) == list(range(50))
    assert data.in_order().__getitems__([49, 0]) == [list(data)[number] for number in (49, 0)]


def test_known_counts_read_nothing() -> None:
    source = Numbers(range(50))
    data = pt.data.counted(source, counts=[50])
    assert (source.opened, len(data)) == (0, 50)


@pytest.mark.parametrize(
    ("source", "counts", "said"),
    [
        (iter([1]), None, "read only once"),
        ([iter([1])], None, "read only once"),
        ([[1], [2]], [1], "1 counts"),
        ([[]], None, "no samples"),
    ],
)
def test_a_source_that_cannot_be_dealt_is_refused(source: object, counts: list[int] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pt.data.counted(source, counts)


def test_a_stream_that_became_shorter_is_named() -> None:
    data = pt.data.counted([[1, 2, 3]], counts=[5], name="log")
    with pytest.raises(ValueError, match="log-0 ended after"):
        list(DataShard(data, rank=0, size=1, batch_size=2))


def test_a_job_names_the_remedy_for_a_stream() -> None:
    with pytest.raises(ValueError, match=r"pt\.data\.counted"):
        check_length(DataShard(Numbers(range(50)), rank=0, size=1, batch_size=2))
