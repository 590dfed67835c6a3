"""`ElasticSampler`: this rank's samples of an epoch, also after changes of the group.

    epoch      a permutation drawn from (seed, epoch), less the processed samples
    rank r     every size-th of it, from the r-th on
    batch b    of all ranks together: the places from b · batch_size · size on, batch_size · size of them

So a rank that records its own batch knows the samples processed by all ranks, and no process takes that knowledge with
it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from polytempo.horovod.torch.basics import is_initialized, rank, size


class SamplerPosition(NamedTuple):
    """The processed samples: a value that is cheap to keep, because it shares unchanged parts."""

    epoch: int
    before: frozenset[int]
    """Samples of earlier groups, and of `record_indices`."""
    order: Sequence[int]
    """The assignment of the others."""
    num_processed: int
    """The number of processed ones among these, from the first."""


class ElasticSampler(Sampler[int]):
    """Deals the samples of a data set to the ranks, and the remaining ones to a new group.

    Call `set_epoch` at the *end* of an epoch, and `record_batch(number of the batch in this iteration, batch size)`
    after each step, on all ranks; keep it in a `TorchState`. Batches have to be counted from 0 in each new iteration.

    Each sample is dealt once an epoch. The ranks' parts differ by one sample at most. Where that would give some ranks
    one batch more (the last one has fewer samples than there are ranks), the others get samples a second time, at most
    size - 1, as torch's `DistributedSampler` does it; where no batch has been recorded yet, the batch size is not
    known, and parts are made equal in the same way. Batch sizes that are multiples of all numbers of ranks, and divide
    the data set, avoid it.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch, self.rank, self.num_replicas = 0, 0, 1
        self.remaining_indices: Sequence[int] = []
        self._before: frozenset[int] = frozenset()
        self._count = 0
        self._alone: set[int] = set()
        self._batch_size = 0
        self.reset()

    # ------------------------------------------------------------------ processed samples

    @property
    def processed_indices(self) -> set[int]:
        """The samples of this epoch that have been processed, as far as this rank knows."""
        return {*self._before, *self.remaining_indices[: self._count], *self._alone}

    @property
    def processed_num(self) -> int:
        """The number of these. Horovod counts samples that two ranks got once for each."""
        return len(self.processed_indices)

    @property
    def recorded_alone(self) -> frozenset[int]:
        """The samples of `record_indices` since the last commit."""
        return frozenset(self._alone)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch: nothing of it has been processed."""
        self.epoch, self._before, self._count, self._alone = epoch, frozenset(), 0, set()
        self._deal()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Batch `batch_idx` of this iteration has been processed by all ranks, each of its own part."""
        width = batch_size * self.num_replicas
        begin = batch_idx * width
        end = min(begin + width, len(self.remaining_indices))
        self._batch_size = max(self._batch_size, batch_size)
        if begin == self._count:
            self._count = max(begin, end)
        elif begin > self._count:
            self._before |= frozenset(self.remaining_indices[begin:end])

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has processed these; the others hear of it in the next commit."""
        self._alone |= set(indices)

    def recorded_by_all(self, indices: Iterable[int]) -> None:
        """All ranks together have processed these, in addition to the known ones."""
        self._before |= frozenset(indices)
        self._alone = set()

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch `batch_idx`."""
        return self._part()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    # ------------------------------------------------------------------ groups

    def reset(self) -> None:
        """Deal the remaining samples to the present group."""
        self.deal_to(*((rank(), size()) if is_initialized() else (0, 1)))

    def deal_to(self, rank: int, size: int) -> None:
        """Deal the remaining samples to a group of `size` ranks, with this process as `rank`."""
        self.rank, self.num_replicas = rank, size
        self._before = frozenset(self.processed_indices)
        self._count, self._alone = 0, set()
        self._deal()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the samples that have been processed."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there; the remaining samples are dealt again.

        A state of Horovod's own sampler has `processed_num`: the first samples of the epoch's order, which is the same.
        """
        self.epoch = int(state_dict["epoch"])
        processed = state_dict.get("processed_indices")
        self._before = frozenset(self._order()[: state_dict["processed_num"]] if processed is None else processed)
        self._count, self._alone, self.remaining_indices = 0, set(), []
        self.reset()

    def position(self) -> SamplerPosition:
        """A copy of the processed samples. Cost: none, but for `record_indices`."""
        return SamplerPosition(
            self.epoch, self._before | self._alone if self._alone else self._before, self.remaining_indices, self._count
        )

    def go_to(self, position: SamplerPosition) -> None:
        """Go back to there; the remaining samples are dealt again, to the present group."""
        self.epoch, self._before, self.remaining_indices, self._count = position
        self._alone = set()
        self.reset()

    # ------------------------------------------------------------------ dealing

    def _order(self) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def _deal(self) -> None:
        self.remaining_indices = [index for index in self._order() if index not in self._before]

    def _part(self) -> list[int]:
        """This rank's samples."""
        return dealt(self.remaining_indices, self.rank, self.num_replicas, self._batch_size)

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of the rest of the epoch.

        The last samples are dealt when they are asked for: by then a batch has been recorded.
        """
        whole = len(self.remaining_indices) // self.num_replicas
        for place in range(whole):
            yield self.remaining_indices[self.rank + place * self.num_replicas]
        yield from self._part()[whole:]

    def __len__(self) -> int:
        """Samples of the largest part. All ranks have the same, so they count the same batches."""
        return -(-len(self.remaining_indices) // self.num_replicas)


def dealt(order: Sequence[int], rank: int, size: int, batch_size: int) -> list[int]:
    """Rank `rank`'s part of `order`: every size-th, and a repeated one where it would have a batch less than others.

    `batch_size` 0: it is not known, and all parts are made equally long. Where there are fewer samples than ranks some
    are repeated, too.
    """
    part = list(order[rank::size])
    whole, left = divmod(len(order), size)
    lacks_batch = whole % batch_size == 0 if batch_size else True
    if left and rank >= left and lacks_batch:
        part.append(order[(len(order) + rank - left) % len(order)])
    return part
