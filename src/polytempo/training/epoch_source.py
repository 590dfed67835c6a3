"""Which loop of a world deals its batches by tickets: what `attach` tells `shard`, as long as it is attached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from polytempo.data.shard import DataShard
from polytempo.worlds import ProcessWorld


class Dealer(Protocol):
    """Deals the batches of one data set."""

    def takes(self, shard: DataShard) -> bool:
        """Whether this shard's next epoch is to be dealt by tickets."""

    def epoch(self, shard: DataShard) -> Iterator[Any]:
        """This rank's batches until the epoch is done."""

    def is_within(self, shard: DataShard) -> bool:
        """Whether an epoch of `shard` is under way."""


_dealers: WeakKeyDictionary[ProcessWorld, Dealer] = WeakKeyDictionary()


def dealer_of(world: ProcessWorld) -> Dealer | None:
    """The one that `world` has."""
    return _dealers.get(world)


def set_dealer(world: ProcessWorld, dealer: Dealer | None) -> None:
    """Let `dealer` deal in `world`. None: every rank takes its own part again."""
    if dealer is None:
        _dealers.pop(world, None)
    else:
        _dealers[world] = dealer
