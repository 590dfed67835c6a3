"""`side_by_side`: several data sets that are read together, each with samples of its own in every step.

                 group 0   1     2     3     4
    labelled         3     1     2     0     3          4 samples, one a group: it begins again
    unlabelled       5 8   0 2   9 4   1 7   6 3        10 samples, two a group: its 5 groups are an epoch

A group is a sample to all else: it is dealt, shuffled, counted and resumed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from polytempo.core.calls.refusals import refuse
from polytempo.data.plan import permutation
from polytempo.data.source import samples_at
from polytempo.data.streams.sharded_data import ShardedData

Collate = Callable[[list[Any]], Any]


@final
class SideBySide(Dataset[dict[str, list[Any]]]):
    """The data set that `side_by_side` makes."""

    def __init__(
        self, sets: Mapping[str, Dataset[Any]], sizes: Mapping[str, int], seed: int | None, collate: Collate
    ) -> None:
        for name, given in sets.items():
            if isinstance(given, IterableDataset | ShardedData) or not hasattr(given, "__len__"):
                refuse({"data source", "stream", "side by side"}, name=name, kind=type(given).__name__)
        self._sets: dict[str, Any] = dict(sets)
        self._counts = {name: len(given) for name, given in self._sets.items()}
        if not sets or min(self._counts.values()) < 1:
            raise ValueError(f"data sets side by side have samples each, and these have {self._counts}")
        if sizes.keys() - sets.keys() or any(size < 1 for size in sizes.values()):
            raise ValueError(f"sizes={dict(sizes)}: give whole numbers from 1 for {', '.join(sets)}")
        self._sizes = {name: sizes.get(name, 1) for name in sets}
        self._orders: dict[str, range | Tensor] = {
            name: range(count) if seed is None else permutation(count, seed, number)
            for number, (name, count) in enumerate(self._counts.items())
        }
        self._collate = collate

    def __len__(self) -> int:
        """Groups of an epoch: as many as the data set needs that lasts longest."""
        return max(-(-count // self._sizes[name]) for name, count in self._counts.items())

    def __getitem__(self, group: int) -> dict[str, list[Any]]:
        """The samples of each data set in a group."""
        if not 0 <= group < len(self):
            raise IndexError(f"groups are 0 to {len(self) - 1}, and {group} was asked for")
        return {name: samples_at(self._sets[name], self._numbers(name, group)) for name in self._sets}

    def _numbers(self, name: str, group: int) -> Sequence[int]:
        begin, count, order = group * self._sizes[name], self._counts[name], self._orders[name]
        return [int(order[number % count]) for number in range(begin, begin + self._sizes[name])]

    def collate(self, groups: list[dict[str, list[Any]]]) -> dict[str, Any]:
        """A batch of each data set."""
        return {name: self._collate([sample for group in groups for sample in group[name]]) for name in self._sets}


def side_by_side(
    sets: Mapping[str, Dataset[Any]],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int | None = 0,
    collate: Collate = default_collate,
) -> SideBySide:
    """Several data sets in one step, each with a batch size of its own: labelled and unlabelled samples, or two tasks.

        sets = pt.data.side_by_side({"labelled": pairs, "unlabelled": pictures}, sizes={"unlabelled": 4})
        job = pt.Job(data=lambda path: pt.Data(sets, collate=sets.collate), batch_size=16, …)
        for batch in pt.shard(DataLoader(sets, batch_size=16, shuffle=True, collate_fn=sets.collate)):
            batch["labelled"], batch["unlabelled"]      # batches of 16 and of 64

    `sizes`: samples of a data set in a group (default: 1); batch sizes count groups. An epoch ends with the data set
    that lasts longest, and the others begin again, as in torch users' `CombinedLoader` of mode "max_size_cycle": each
    sample comes once an epoch or more often. `seed`: the samples of a group are drawn once, and groups are shuffled in
    each epoch; None: in the order of the data sets. `collate` makes a batch of one data set's samples.

    A loss that is a sum of means over the batches has the same mean for any number of workers, because all groups have
    equal sizes. Data sets that give turns, a sample of one or of another: `pt.data.mixture`, or torch's
    `ConcatDataset`.

    Errors: `Incompatible`, a ValueError with a code: PT2612 (a stream, or data in shards); ValueError for a data set
    without samples and for wrong sizes.
    """
    return SideBySide(sets, sizes or {}, seed, collate)
