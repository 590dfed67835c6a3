"""`DataShard`: one rank's part of a data set or stream, epoch after epoch, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polytempo.core.arithmetic.slice_tree import subtree
from polytempo.data.batches import Batches
from polytempo.data.mover import BatchMover
from polytempo.data.plan import (
    Deals,
    Pick,
    Shares,
    apportioned,
    check_enough,
    check_global_batch,
    global_batches,
    own_picks,
    permutation,
)
from polytempo.data.source import (
    Chosen,
    Gathered,
    chosen_loader,
    from_tensors,
    read_source,
    sampler_epoch,
    tensors_of,
)
from polytempo.data.spans import PlaceSpan, checked_place, num_places, parted
from polytempo.data.streams.lane_reader import LaneLoaders
from polytempo.data.streams.lanes import Lanes
from polytempo.data.streams.sharded_data import ShardedData
from polytempo.data.streams.stream_pieces import Agree, in_pieces
from polytempo.data.streams.unsized import from_stream


@final
class DataShard:
    """Deals a data set to `size` ranks: every sample once an epoch, in one order for every `size`.

    The order of an epoch is a permutation drawn from (seed, epoch). Step t takes its next `size * batch_size` samples,
    and rank r has the r-th contiguous slice of them. How the end of an epoch is dealt is written in
    `polytempo.data.plan`; all ranks always make the same number of steps.

    Iterating yields this rank's batches for the rest of the current epoch and then moves on to the next
    epoch. Batches are counted when they are handed out, so a state saved after the step on a batch is
    exact, with prefetching worker processes too. Use one iterator at a time.

    `source` is a map-style data set, a stream (`IterableDataset`: every rank reads all of it and keeps its
    part; a position is found again by skipping), or a `DataLoader`. Of a loader, the batch size is taken
    per rank, shuffling is recognized by its sampler, and `collate_fn` and the worker processes' settings
    are kept; its `drop_last` is not, because the last batch is dealt to all ranks. (On a stream, memory is
    pinned a sample at a time, before collating.) Tensors in memory are indexed a batch at a time. A
    `DistributedSampler` is taken for its `shuffle` and for the epoch that its `set_epoch` names, not for its parts.

        for x, y in DataShard(dataset, rank=0, size=2, batch_size=32):
            ...

    With `slices` every global batch is cut into so many slices, and a rank gets the slices of its `subtree` one by one,
    as many batches a step (`own`). With `micro_batches` each batch comes in at most so many parts (`following`). With
    `global_batch_size` neither a global batch nor a slice depends on `size`. With `together` this rank's batches hold
    the batches of so many ranks from this one on, one behind the other; all of them must get equally many samples
    (`plan.alike`), and the data must be tensors in memory.

    Raises ValueError for a data set with fewer samples than ranks or slices, for a loader with a sampler or
    batch sampler of its own, for a global batch with fewer samples than ranks or slices, and for a stream in slices.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        *,
        rank: int,
        size: int,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        global_batch_size: int | None = None,
        slices: int | None = None,
        gathered: Gathered | None = None,
        together: int = 1,
        micro_batches: int = 1,
        device: torch.device | None = None,
        order: Callable[[int], Tensor] | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`batch_size` is per rank; it and `shuffle` (data sets: True, streams: False) override a loader's.

        `global_batch_size` counts all ranks' samples, and overrides `batch_size`. `gathered` is shared by ranks of one
        process: a batch is then a window into it, where tensors in memory are dealt whole. `device`: batches are moved
        there (None: they stay), of tensors in memory one ahead; reading others may draw random numbers for its step.
        `order`: the items of an epoch, in place of a permutation. `agree`: hands each rank's numbers to all, in each
        step; ranks then read a stream with shards in parts.
        """
        if global_batch_size is not None:
            batch_size = -(-global_batch_size // size)
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank} of {size}; ranks count from 0 to size - 1")
        self._source = read_source(source, batch_size, shuffle)
        self._given = source
        self._tensors = tensors_of(self._source)
        self._chosen = Chosen()
        self._loader: DataLoader[Any] | None = None
        is_sharded = isinstance(self._source.dataset, ShardedData)
        self._lanes = LaneLoaders(self._source, seed) if is_sharded else None
        self._gathered, self._together, self._micro_batches = gathered, together, micro_batches
        self._device, self._mover = device, BatchMover(device)
        self._given_order = order
        self._sampler_epoch = sampler_epoch(self._source)
        self._generator, self._agree = torch.Generator(), agree
        self.rank, self.size, self.seed = rank, size, seed
        self.batch_size, self.shuffle = self._source.batch_size, self._source.shuffle
        self.num_samples = _count(self._source.dataset)
        """Samples of an epoch, over all ranks; None for a stream."""
        self.own = range(rank, rank + 1) if slices is None else subtree(slices, size, rank)
        """This rank's parts of a global batch: its own number, or its slices."""
        self.slices, self._parts = slices, slices or size
        self._global_batch_size = global_batch_size
        self.pieces = None if agree is None else in_pieces(self._source, rank, size, agree)
        self._check()
        self.shares: Shares | None = None
        """The proportion of the ranks' parts of each global batch; None: equal parts. See `deal`."""
        self.balanced = False
        """True if parts follow speeds: then a saved position's shares hold."""
        self._anew = False
        """True after `deal` has changed the shares: the rest of the epoch is dealt again."""
        self.taken = 0
        """Samples that this rank was handed so far, over all epochs."""
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch that have been handed out, over all ranks."""
        self.local_samples = self.global_samples = self._earlier = 0
        self.following = 0
        """Micro-batches of the present batch that have not been handed out yet."""
        self._left: list[PlaceSpan] | Callable[[], list[PlaceSpan]] = []
        self._num_left = 0
        self.spans: list[PlaceSpan] = []
        """The places that were handed out in the last step, and count."""

    def _check(self) -> None:
        what = "workers" if self.slices is None else "slices"
        if self.num_samples is not None:
            check_enough(self.num_samples, self._parts, what)
        elif self.slices is not None or self._global_batch_size is not None:
            raise ValueError("a stream (IterableDataset) has batches of batch_size a rank alone; give a data set")
        check_global_batch(self.global_batch_size, self._parts, what)

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in a step, but for an epoch's last ones."""
        return self._global_batch_size or self.size * self.batch_size

    @property
    def left(self) -> list[PlaceSpan]:
        """Places that are dealt before the rest of the epoch: they were dealt to a worker that was lost with them. For
        `ShardedData` the rests of all lanes; their last places are the epoch's last ones.
        """
        if callable(self._left):
            self._left = self._left()
        return self._left

    @left.setter
    def left(self, spans: list[PlaceSpan]) -> None:
        """Set the places."""
        self._left, self._num_left = spans, num_places(spans)

    @property
    def used(self) -> int:
        """Samples of this epoch that have been used: `consumed` without the `left` ones. Negative where these are of an
        earlier epoch."""
        return self.consumed - self._num_left

    @property
    def samples(self) -> int:
        """Samples of all epochs that have been used, over all ranks. A stream counts earlier epochs in `_earlier`."""
        return (self._earlier if self.num_samples is None else self.epoch * self.num_samples) + self.used

    @property
    def epochs(self) -> float:
        """Epochs that are behind us. A stream counts the ended ones, because its length is unknown."""
        return self.epoch if self.num_samples is None else self.epoch + self.used / self.num_samples

    @property
    def dataset(self) -> Any:
        """The data set that is dealt."""
        return self._source.dataset

    @property
    def in_memory(self) -> bool:
        """True if batches are taken out of tensors, so that nothing is drawn meanwhile."""
        return self._tensors is not None

    @property
    def share(self) -> float | None:
        """This rank's part of the last step: its samples over all ranks' samples. None before the first."""
        return self.local_samples / self.global_samples if self.global_samples else None

    @property
    def batch_samples(self) -> int:
        """Samples in the batch that was handed out last: `local_samples`, or 1 for a stand-in, which counts nothing."""
        return max(1, self.local_samples)

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks. A stream has none (TypeError)."""
        if self.num_samples is None:
            raise TypeError("a stream (IterableDataset) has no length; it ends where it ends")
        return len(global_batches(self.num_samples, self.global_batch_size, self._parts))

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches for the rest of the epoch; then the next epoch begins."""
        self._follow_sampler()
        self._anew = True
        while self._anew:
            self._anew = False
            yield from self._rest()
            self._anew = self._anew and (self.consumed != self.num_samples or bool(self.left))
        self._earlier += self.consumed
        self.epoch += 1
        self._begin()

    def _rest(self) -> Iterator[Any]:
        """The rest of the epoch, or its batches until `deal` changes the shares."""
        if self._lanes is not None:
            yield from self._rest_of_lanes(self._lanes)
            return
        at, shift = (0, self.consumed - num_places(self.left)) if self.left else (self.consumed, 0)
        again: list[PlaceSpan] = []
        ended, begins, each = 0, True, len(self.own)
        for step, batch in self._moved():
            if ended % each == 0 and begins:
                begin, at, self.spans = at, at + step.global_samples, []
                again, self.left = parted(self.left, step.global_samples) if self.left else ([], [])
                self.consumed += 0 if again else step.global_samples
            self.local_samples, self.global_samples = step.local_samples, step.global_samples
            self.following, begins = step.following, not step.following
            ended += begins
            if step.local_samples and again:
                self.spans += parted(parted(again, step.start - begin)[1], step.local_samples)[0]
            elif step.local_samples:
                first = step.start + shift
                self.spans.append(PlaceSpan(self.epoch, first, first + step.local_samples))
            self.taken += step.local_samples
            yield batch
            if self._anew and begins and ended % each == 0:
                return

    def _rest_of_lanes(self, loaders: LaneLoaders) -> Iterator[Any]:
        """The same of data in shards: all places are left then, in the order of lanes."""
        assert self.num_samples is not None
        places = [*self.left, PlaceSpan(self.epoch, self.consumed, self.num_samples)]
        lanes = Lanes(places, self.global_batch_size, self._parts, loaders.interleave, self._part_shares)
        ended, begins, each = 0, True, len(self.own)
        self._seed_generator()
        for step, batch in loaders.batches(lanes, self.own, self._micro_batches, self._generator):
            if ended % each == 0 and begins:
                steps, self.spans, self.consumed = ended // each + 1, [], self.num_samples
                self._left, self._num_left = partial(lanes.left, steps), lanes.num_left(steps)
            self.local_samples, self.global_samples = step.local_samples, step.global_samples
            self.following, begins = step.following, not step.following
            ended += begins
            self.spans += lanes.between(step.start, step.stop) if step.local_samples else []
            self.taken += step.local_samples
            yield self._mover.moved(batch)
            if self._anew and begins and ended % each == 0:
                return

    @property
    def _part_shares(self) -> Shares | None:
        pieces, shares = self._parts // self.size, self.shares if self.slices is None else None
        return None if shares is None else tuple(share for share in shares for _ in range(pieces))

    def _seed_generator(self) -> None:
        self._generator.manual_seed(((self.seed * 1_000_003 + self.epoch) * 1_000_003 + self.rank) % 2**63)

    @cached_property
    def given_loader(self) -> DataLoader[Any]:
        """The loader that was given, or a plain one with the same settings where a data set was."""
        source = self._source
        return source.loader or DataLoader(source.dataset, source.batch_size, shuffle=source.shuffle)

    def grow(self, global_batch_size: int, pieces: int = 1) -> None:
        """Let steps have so many samples over all ranks, from the next iteration on.

        Each rank's part comes in so many `pieces`, one batch after the other, which are consecutive places. The rest of
        the epoch is dealt again, each sample once. ValueError for fewer samples than there are pieces.
        """
        if self.slices is not None or self.num_samples is None:
            raise ValueError("a batch that is cut into slices, or that comes from a stream, does not grow")
        check_global_batch(global_batch_size, self.size * pieces, "pieces of the ranks' batches")
        self._global_batch_size, self._parts = global_batch_size, self.size * pieces
        self.batch_size = -(-global_batch_size // self.size)
        self.own = range(self.rank * pieces, (self.rank + 1) * pieces)

    def deal(self, shares: Shares | None) -> None:
        """Let the ranks' parts of global batches be in this proportion, from the next step on; None: equal parts.

        All ranks call it after the same step. ValueError for streams, and for another number of shares. With `slices` a
        part is a run of whole slices; None: `subtree`.
        """
        if shares is not None and self.num_samples is None:
            raise ValueError("a batch that comes from a stream has equal parts")
        if shares is not None and (len(shares) != self.size or min(shares) < 1):
            raise ValueError(f"the shares are {shares}; give {self.size} whole numbers from 1, one for each rank")
        self._anew = self._anew or shares != self.shares
        self.shares = shares
        if self.slices is not None:
            self.own = range(self.slices)[sum(self.parts[: self.rank]) :][: self.parts[self.rank]]

    @property
    def parts(self) -> Shares:
        """The samples, or slices, of each rank in a full global batch."""
        if self.slices is None:
            return apportioned(self.global_batch_size, self.shares or (1,) * self.size)
        own = (subtree(self.slices, self.size, rank) for rank in range(self.size))
        return tuple(map(len, own)) if self.shares is None else apportioned(self.slices, self.shares)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, on all ranks alike; where it is the current one, its position stays.

        A loop that trains whole epochs need not call it. Raises ValueError for an epoch that is not a whole number from
        0.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"the epoch is {epoch!r}; epochs are whole numbers, counted from 0")
        if epoch != self.epoch:
            self.epoch, self.left = epoch, []
            self._begin()

    def _begin(self) -> None:
        self.consumed = 0
        if self.pieces is not None:
            self.pieces.begin()

    def _follow_sampler(self) -> None:
        named = sampler_epoch(self._source)
        if named is not None and named != self._sampler_epoch:
            self._sampler_epoch = named
            self.set_epoch(named)

    def at(self, *, rank: int, size: int) -> DataShard:
        """The same data at the same position, as `rank` of `size` sees it."""
        other = DataShard(
            self._given,
            rank=rank,
            size=size,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            global_batch_size=self._global_batch_size,
            slices=self.slices,
            micro_batches=self._micro_batches,
            device=self._device,
            order=self._given_order,
            agree=self._agree,
        )
        other.balanced = self.balanced
        other.load_state_dict(self.state_dict())
        return other

    def dealt(self, deals: Deals) -> Batches:
        """The same data for workers that get batches one by one. ValueError for a stream."""
        return Batches(
            self._given,
            size=self.size,
            batch_size=self.batch_size,
            seed=self.seed,
            deals=deals,
            shuffle=self.shuffle,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks; plain numbers, and `left` and `shares` as lists of them where there is
        something."""
        place: dict[str, Any] = {"seed": self.seed, "epoch": self.epoch, "consumed": self.consumed}
        place |= {"num_samples": self.num_samples} | ({} if self.shares is None else {"shares": list(self.shares)})
        place |= {} if self.num_samples is not None else {"earlier": self._earlier}
        place |= {} if self._lanes is None else {"order": self._lanes.order}
        place |= {} if self.pieces is None else self.pieces.position()
        return place | ({"left": [list(span) for span in self.left]} if self.left else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position, also one saved with another number of ranks, which then have equal parts.

        Raises ValueError where the state is not of this data and seed.
        """
        order = None if self._lanes is None else self._lanes.order
        pieces, saved = None if self.pieces is None else self.pieces.number, state.get("num_pieces")
        if pieces is None and saved is not None:
            raise ValueError(f"the saved position is of a stream in {saved} shards; go on with at most {saved} ranks")
        own = {"seed": self.seed, "num_samples": self.num_samples, "order": order, "num_pieces": pieces}
        (self.epoch, self.consumed), self._earlier = checked_place(state, own), state.get("earlier", 0)
        if self.pieces is not None:
            self.pieces.resume(state["pieces"])
        self.left = [PlaceSpan(*span) for span in state.get("left", [])]
        shares = tuple(state.get("shares", ()))
        self.deal(shares if self.balanced and len(shares) == self.size else None)
        self.local_samples = self.global_samples = 0

    def _moved(self) -> Iterator[tuple[Pick, Any]]:
        if not self._mover.moves:
            return self._batches()
        if self.in_memory:
            return self._mover.ahead(self._batches())
        return ((step, self._mover.moved(batch)) for step, batch in self._batches())

    def _batches(self) -> Iterator[tuple[Pick, Any]]:
        if self.pieces is not None:
            return self.pieces.batches(self.consumed, self.epoch, self._micro_batches)
        if self.num_samples is None:
            return from_stream(self._source, self.consumed, self.size, self.rank, self._micro_batches)
        batches = global_batches(self.num_samples - self.consumed, self.global_batch_size, self._parts)
        order, begin = self._order(self.num_samples, self.epoch), self.consumed
        if self.left:
            batches = global_batches(num_places(self.left), self.global_batch_size, self._parts) + batches
            again = [self._order(self.num_samples, span.epoch)[span.start : span.stop] for span in self.left]
            order, begin = torch.cat([*again, order[self.consumed :]]), 0
        steps = list(own_picks(begin, batches, self._parts, self.own, self._micro_batches, self._part_shares))
        if self._tensors is not None:
            tensors, rows = self._tensors
            if self._together > 1:
                steps = [step._replace(stop=step.start + self._together * step.num_samples) for step in steps]
            if rows is not None or self.left:
                return from_tensors(tensors, order if rows is None else rows[order], steps)
            return from_tensors(tensors, order, steps, self._gathered, self.epoch)
        if self._loader is None:
            self._loader = chosen_loader(self._source, self._chosen, self._generator)
        self._seed_generator()
        self._chosen.batches = [order[step.start : step.stop].tolist() for step in steps]
        return zip(steps, self._loader, strict=True)

    def _order(self, num_samples: int, epoch: int) -> Tensor:
        if self._given_order is not None:
            return self._given_order(epoch)
        return permutation(num_samples, self.seed, epoch) if self.shuffle else torch.arange(num_samples)


def _count(dataset: Dataset[Any]) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"{type(dataset).__name__} has no __len__; give it one, or make it an IterableDataset")
    return len(dataset)
