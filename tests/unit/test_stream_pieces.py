"""Streams without a length in pieces: each read by one rank, each sample once, resumed by other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from polytempo.data.shard import DataShard


class Pieces(IterableDataset[int]):
    """Numbers in pieces, with the interface of Hugging Face's streaming data sets. Counts its reads."""

    def __init__(self, pieces: Sequence[Sequence[int]]) -> None:
        self.pieces, self.read = pieces, 0

    @property
    def num_shards(self) -> int:
        return len(self.pieces)

    def shard(self, num_shards: int, index: int) -> Pieces:
        assert num_shards == len(self.pieces)
        return Pieces([self.pieces[index]])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in (each for piece in self.pieces for each in piece):
            self.read += 1
            yield number


def dealt(pieces: Sequence[Sequence[int]], size: int, steps: int, state: Any = None, **more: Any) -> tuple[Any, ...]:
    """All ranks' samples that count, their shares in each step, the position after it, and the samples read."""
    barrier, rows = Barrier(size, timeout=10), [[0, 0, 0] for _ in range(size)]
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        def agree(row: Sequence[int]) -> list[list[int]]:
            rows[rank] = list(row)
            barrier.wait()
            all_rows = [*rows]
            barrier.wait()
            return all_rows

        source = Pieces(pieces)
        given = DataLoader(source, batch_size=2) if more.get("loader") else source
        shard = DataShard(given, rank=rank, size=size, batch_size=2, agree=agree)
        if state is not None:
            shard.load_state_dict(state)
        assert shard.pieces is not None
        seen, shares = list[int](), list[float | None]()
        for _, batch in zip(range(steps), shard, strict=False):
            seen += batch[: shard.local_samples].tolist()
            shares.append(shard.share)
        read = sum(piece.read for piece in shard.pieces._pieces)  # type: ignore[union-attr, attr-defined]
        found[rank] = seen, shares, shard.state_dict(), read

    threads = [Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen, shares, states, reads = zip(*found, strict=True)
    assert all(each == states[0] for each in states)
    assert all(sum(step) == pytest.approx(1) for step in zip(*shares, strict=True))
    return sorted(x for each in seen for x in each), states[0], sum(reads)


PIECES = [range(9), range(9, 10), range(10, 10), range(10, 23), range(23, 30)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_sample_is_read_once_by_one_rank(size: int) -> None:
    seen, state, read = dealt(PIECES, size, 100)
    assert seen == list(range(30))
    assert read <= 30 + size  # and a stand-in for a rank without samples
    assert (state["epoch"], state["consumed"]) == (1, 0)


def test_as_many_ranks_go_on_with_the_same_batches() -> None:
    """Also where one of them has ended a piece, and others have not."""
    _, whole, _ = dealt(PIECES, 2, 4)
    _, first, _ = dealt(PIECES, 2, 3)
    _, second, _ = dealt(PIECES, 2, 1, first)
    assert second == whole


def test_other_numbers_of_ranks_go_on() -> None:
    seen, state = list[int](), None
    for size, steps in ((3, 2), (1, 3), (2, 100)):
        more, state, _ = dealt(PIECES, size, steps, state)
        seen += more
    assert sorted(seen) == list(range(30))
    again, _, _ = dealt(PIECES, 2, 100, state)
    assert again == list(range(30))


def test_a_loader_and_mistakes() -> None:
    seen, state, _ = dealt(PIECES, 2, 100, loader=True)
    assert seen == list(range(30))
    with pytest.raises(ValueError, match="in 5 shards; go on"):
        DataShard(Pieces(PIECES), rank=0, size=1, batch_size=2).load_state_dict(state)
    longer = DataShard(Pieces([*PIECES, [30]]), rank=0, size=1, batch_size=2, agree=lambda row: [row])
    with pytest.raises(ValueError, match="num_pieces=5, this run has num_pieces=6"):
        longer.load_state_dict(state)
    assert longer.at(rank=0, size=1).state_dict() == longer.state_dict()
    assert DataShard(Pieces(PIECES), rank=0, size=6, batch_size=2, agree=lambda row: [row]).pieces is None
    alone = DataShard(Pieces([[], []]), rank=0, size=1, batch_size=2, agree=lambda row: [row])
    with pytest.raises(ValueError, match="0 samples cannot be dealt"):
        list(alone)
    epochs = DataShard(Pieces(PIECES), rank=0, size=1, batch_size=2, agree=lambda row: [row])
    for epoch in range(2):
        list(epochs)
        assert {piece.epoch for piece in epochs.pieces._pieces} == {epoch}  # type: ignore[union-attr, attr-defined]
    whole = DataShard(Pieces([range(3)]), rank=0, size=1, batch_size=2, agree=lambda row: [row])
    assert whole.pieces is None
    assert torch.cat(list(whole)).tolist() == [0, 1, 2]
