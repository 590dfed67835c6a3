"""`EpochSource`: where the batches of a world come from, as long as a parameter server deals them by tickets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from polytempo.data.shard import DataShard
from polytempo.worlds import ProcessWorld


class EpochSource(Protocol):
    """A loop that gets the batches of one data set by tickets; `shard` asks it as long as it is attached."""

    def takes(self, shard: DataShard) -> bool:
        """Whether this shard's next epoch is to be dealt by tickets."""

    def epoch(self, shard: DataShard) -> Iterator[Any]:
        """This rank's batches until the epoch is done."""

    def is_within(self, shard: DataShard) -> bool:
        """Whether an epoch of `shard` is under way."""


_sources: WeakKeyDictionary[ProcessWorld, EpochSource] = WeakKeyDictionary()


def source_of(world: ProcessWorld) -> EpochSource | None:
    """The one that `world` has; None: every rank takes its own part."""
    return _sources.get(world)


def set_source(world: ProcessWorld, source: EpochSource | None) -> None:
    """The batches of `world` come from `source`. None: every rank takes its own part again."""
    if source is None:
        _sources.pop(world, None)
    else:
        _sources[world] = source
