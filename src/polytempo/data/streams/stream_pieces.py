"""`StreamPieces`: a stream without a length in pieces, which ranks read in parts.

pieces      0 ━━━━━━━  1 ━━━  2 ━━━━━  3 ━━━━━━━━━      lengths are unknown
rank 0      0 ━━━━━━━  2 ━━━━━                          its pieces one after the other, a batch a step
rank 1      1 ━━━  3 ━━━━━━━━━
each step   (samples, pieces used up, place in the present one) of each rank ── to all ──▶ a stand-in, or the end

So all ranks make equally many steps, know the rest of each piece, and any number of ranks can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from polytempo.data.plan import Pick, check_enough
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
        self._source, self._pieces, self._rank, self._size, self._agree = source, pieces, rank, size, agree
        self.left: list[dict[int, int]] = []
        """The pieces of each rank that are not used up, with the samples of each that have been handed out."""
        self.begin()

    @property
    def number(self) -> int:
        """The number of pieces."""
        return len(self._pieces)

    def begin(self) -> None:
        """Begin an epoch."""
        self._deal(dict.fromkeys(range(self.number), 0))

    def position(self) -> dict[str, Any]:
        """The number of pieces, and `left`, as plain numbers."""
        return {"num_pieces": self.number, "pieces": [[[*each] for each in own.items()] for own in self.left]}

    def resume(self, left: Sequence[Iterable[tuple[int, int]]]) -> None:
        """Go on from a saved `left`: equally many ranks with their pieces, others with dealt ones."""
        if len(left) == self._size:
            self.left = [dict(own) for own in left]
        else:
            self._deal(dict(sorted(chain.from_iterable(left))))

    def _deal(self, left: dict[int, int]) -> None:
        pieces = list(left.items())
        self.left = [dict(pieces[rank :: self._size]) for rank in range(self._size)]

    def batches(self, consumed: int, epoch: int) -> Iterator[tuple[Pick, Any]]:
        """This rank's batches of the rests. ValueError for a stream without samples."""
        source, begun, size = self._source, dict(chain.from_iterable(own.items() for own in self.left)), self._size
        collate = default_collate if source.loader is None else source.loader.collate_fn
        owned = [list(own) for own in self.left]
        mine, ended, place = owned[self._rank], 0, begun.get(next(iter(owned[self._rank]), -1), 0)
        samples = (each for piece in mine for each in chain(self._rest(piece, begun[piece], epoch), (_END,)))
        instead: list[Any] = []
        while True:
            taken: list[Any] = []
            for sample in samples:
                if sample is _END:
                    ended += 1
                    place = begun[mine[ended]] if ended < len(mine) else 0
                    continue
                taken.append(sample)
                place += 1
                if len(taken) == source.batch_size:
                    break
            rows = self._agree((len(taken), ended, place))
            total = sum(row[0] for row in rows)
            if not total:
                check_enough(consumed, 1 if consumed else size)
                return
            self.left = [
                {piece: row[2] if number == 0 else begun[piece] for number, piece in enumerate(own[row[1] :])}
                for own, row in zip(owned, rows, strict=True)
            ]
            instead = taken[:1] or instead or list(islice(chain.from_iterable(self._pieces), 1))
            yield Pick(consumed, consumed + max(1, len(taken)), len(taken), total), collate(taken or instead)
            consumed += total

    def _rest(self, piece: int, place: int, epoch: int) -> Iterator[Any]:
        """The samples of a piece from `place` on, in the order that a stream with `set_epoch` has in this epoch."""
        found: Any = self._pieces[piece]
        if hasattr(found, "set_epoch"):
            found.set_epoch(epoch)
        if self._source.loader is not None and self._source.loader.num_workers:
            settings = worker_settings(self._source.loader) | {"num_workers": 1, "persistent_workers": False}
            found = DataLoader(found, batch_size=None, collate_fn=_as_it_is, **settings)
        return islice(iter(found), place, None)


_END = object()


def _as_it_is(sample: Any) -> Any:
    return sample
