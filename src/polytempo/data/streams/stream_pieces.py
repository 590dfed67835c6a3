"""`StreamPieces`: a stream without a length in pieces, which ranks read in parts.

pieces      0 ━━━━━━━  1 ━━━  2 ━━━━━  3 ━━━━━━━━━      lengths are unknown
rank 0      0 ━━━━━━━  2 ━━━━━                          its pieces one after the other, a batch a step
rank 1      1 ━━━  3 ━━━━━━━━━
each step   (samples, pieces used up, place in the present one) of each rank ── to all ──▶ a stand-in, or the end

So all ranks make equally many steps, know the rest of each piece, and any number of ranks can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from polytempo.data.plan import Pick, check_enough, cut
from polytempo.data.source import Source, worker_settings

Agree = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""agree(row): the rows of all ranks, each of 3 whole numbers. All ranks call it equally often."""


def in_pieces(source: Source, rank: int, size: int, agree: Agree) -> StreamPieces | None:
    """The pieces of a stream with `num_shards` and `shard(num_shards=, index=)`, as of Hugging Face. None for other
    streams, and for fewer pieces than ranks."""
    dataset: Any = source.dataset
    number = getattr(dataset, "num_shards", None) if isinstance(dataset, IterableDataset) else None
    if not isinstance(number, int) or number < max(2, size) or not hasattr(dataset, "shard"):
        return None
    pieces = [dataset.shard(num_shards=number, index=index) for index in range(number)]
    return StreamPieces(source, pieces, rank, size, agree)


class StreamPieces:
    """One rank's batches of the pieces. Each piece is read by one rank, by at most one worker process at a time.

    Cost: 24 bytes a rank in each step. Pieces of unequal sizes end at different steps: a rank without samples then
    takes part with a copy that counts nothing, so have many pieces for each rank.
    """

    def __init__(self, source: Source, pieces: Sequence[Iterable[Any]], rank: int, size: int, agree: Agree) -> None:
        self._source, self._pieces, self._size, self._agree = source, pieces, size, agree
        self.rank, self.batch_size = rank, source.batch_size
        self._reader: _Reader | None = None
        self.left: list[dict[int, int]] = []
        """The pieces of each rank that are not used up, with the samples of each that have been handed out."""
        self.begin()

    @property
    def number(self) -> int:
        """The number of pieces."""
        return len(self._pieces)

    def begin(self) -> None:
        """Begin an epoch."""
        self._reader = None
        self._deal(dict.fromkeys(range(self.number), 0))

    def position(self) -> dict[str, Any]:
        """The number of pieces, and `left`, as plain numbers."""
        return {"num_pieces": self.number, "pieces": [[[*each] for each in own.items()] for own in self.left]}

    def resume(self, left: Sequence[Iterable[tuple[int, int]]]) -> None:
        """Go on from a saved `left`: equally many ranks with their pieces, others with dealt ones."""
        self._reader = None
        if len(left) == self._size:
            self.left = [dict(own) for own in left]
        else:
            self._deal(dict(sorted(chain.from_iterable(left))))

    def _deal(self, left: dict[int, int]) -> None:
        pieces = list(left.items())
        self.left = [dict(pieces[rank :: self._size]) for rank in range(self._size)]

    def row(self, epoch: int) -> tuple[int, int, int]:
        """Read this rank's next batch, where that has not been done, and return its numbers for the other ranks."""
        if self._reader is None:
            self._reader = _Reader(self, self.left, epoch)
        return self._reader.row()

    @cached_property
    def _first(self) -> list[Any]:
        """The stream's first sample, which stands in where a rank has none."""
        return list(islice(chain.from_iterable(self._pieces), 1))

    def hear(self, rows: Sequence[Sequence[int]]) -> None:
        """Take the rows of all ranks for the next batch, where `agree` is a `RowsHeard`."""
        assert isinstance(self._agree, RowsHeard)
        self._agree.rows = rows

    def batches(self, consumed: int, epoch: int, cuts: int = 1) -> Iterator[tuple[Pick, Any]]:
        """This rank's batches of the rests, each in at most `cuts` micro-batches. ValueError for a stream without
        samples."""
        source, size = self._source, self._size
        collate = default_collate if source.loader is None else source.loader.collate_fn
        if self._reader is None or self._reader.has_given:
            self._reader = _Reader(self, self.left, epoch)
        reader = self._reader
        while True:
            rows = self._agree(reader.row())
            total = sum(row[0] for row in rows)
            if not total:
                check_enough(consumed, 1 if consumed else size)
                return
            taken = reader.give()
            self.left = reader.left(rows)
            own = taken or self._first
            whole = Pick(consumed, consumed + len(own), len(taken), total)
            for pick in cut(whole, max(1, min(cuts, *(row[0] for row in rows)))):
                yield pick, collate(own[pick.start - consumed : pick.stop - consumed])
            consumed += total

    def samples(self, pieces: Sequence[int], begun: dict[int, int], epoch: int) -> Iterator[Any]:
        """The rests of some pieces, each with `END` behind it."""
        return (each for piece in pieces for each in chain(self._rest(piece, begun[piece], epoch), (END,)))

    def _rest(self, piece: int, place: int, epoch: int) -> Iterator[Any]:
        """The samples of a piece from `place` on, in the order that a stream with `set_epoch` has in this epoch."""
        found: Any = self._pieces[piece]
        if hasattr(found, "set_epoch"):
            found.set_epoch(epoch)
        if self._source.loader is not None and self._source.loader.num_workers:
            settings = worker_settings(self._source.loader) | {"num_workers": 1, "persistent_workers": False}
            found = DataLoader(found, batch_size=None, collate_fn=_as_it_is, **settings)
        return islice(iter(found), place, None)


class _Reader:
    """One rank's way through its pieces, from the rests that are `left`. It reads a batch before that is given out."""

    def __init__(self, pieces: StreamPieces, left: Sequence[dict[int, int]], epoch: int) -> None:
        self._begun = dict(chain.from_iterable(own.items() for own in left))
        self._owned, self._most = [list(own) for own in left], pieces.batch_size
        self._mine = self._owned[pieces.rank]
        self._samples = pieces.samples(self._mine, self._begun, epoch)
        self._ended, self._place = 0, self._begun.get(next(iter(self._mine), -1), 0)
        self._read: list[Any] | None = None
        self.has_given = False

    def row(self) -> tuple[int, int, int]:
        """Samples of the next batch, pieces used up after it, and the place in the present one."""
        if self._read is None:
            self._read = []
            for sample in self._samples:
                if sample is END:
                    self._ended += 1
                    self._place = self._begun[self._mine[self._ended]] if self._ended < len(self._mine) else 0
                    continue
                self._read.append(sample)
                self._place += 1
                if len(self._read) == self._most:
                    break
        return len(self._read), self._ended, self._place

    def give(self) -> list[Any]:
        """The samples of the batch that was read."""
        assert self._read is not None
        taken, self._read, self.has_given = self._read, None, True
        return taken

    def left(self, rows: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """The rests of each rank's pieces after the batches with these rows."""
        return [
            {piece: row[2] if number == 0 else self._begun[piece] for number, piece in enumerate(own[row[1] :])}
            for own, row in zip(self._owned, rows, strict=True)
        ]


class RowsHeard:
    """An `agree` that returns the rows of all ranks which its owner has set before."""

    def __init__(self) -> None:
        self.rows: Sequence[Sequence[int]] = ()

    def __call__(self, row: Sequence[int]) -> Sequence[Sequence[int]]:
        """The rows of all ranks."""
        return self.rows


END = object()
"""Stands behind the samples of a piece."""


def _as_it_is(sample: Any) -> Any:
    return sample
