"""The saved state of a batch scheduler, and the tickets left when a run goes on from it.

tickets   0 1 2 3 4 5 6 7 | 8 9 …          frontier 8: no ticket from there on was ever dealt
done      0 1 2   4 5   7                  every shard has them; 3 and 6 are dealt again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from polytempo.core.arithmetic.ranges import Range, Ranges

LIVES = 1_000_000
"""A resumed run numbers the lives of workers from here on, times its generation: above all that were before."""
_VERSION = 2
_MOST_ABSENT = 10_000_000


class SavedSchedule(msgspec.Struct, frozen=True, array_like=True):
    """The state of a batch scheduler. Workers are not in it: after a restart all of them are new."""

    version: int
    batches_per_epoch: int
    frontier: int
    """No ticket from this one on was ever dealt."""
    done: tuple[Range, ...]


class Remaining(NamedTuple):
    """The done tickets, the tickets below `frontier` to deal again, and the first ticket to deal for the first time."""

    done: Ranges
    again: list[int]
    frontier: int


def encoded(batches_per_epoch: int, frontier: int, done: tuple[Range, ...]) -> bytes:
    """The state as bytes."""
    return msgspec.msgpack.encode(SavedSchedule(_VERSION, batches_per_epoch, frontier, done))


def decoded(state: bytes, batches_per_epoch: int) -> SavedSchedule:
    """The state that `encoded` made. ValueError where it is none, or of another number of batches an epoch."""
    try:
        saved = msgspec.msgpack.decode(state, type=SavedSchedule)
    except msgspec.MsgspecError as error:
        raise ValueError(f"these bytes are not a batch scheduler's state: {error}") from error
    if saved.version != _VERSION:
        raise ValueError(f"the batch scheduler's state has version {saved.version}, this program reads {_VERSION}")
    if saved.batches_per_epoch != batches_per_epoch:
        raise ValueError(
            f"the saved run has {saved.batches_per_epoch} batches an epoch, this one {batches_per_epoch}; "
            "go on with the same data and batch size, or begin a new run"
        )
    return saved


def remaining(saved: SavedSchedule, applied: Sequence[Sequence[Range]], places: int) -> Remaining:
    """The tickets left to deal. `applied`: for each shard the tickets in its snapshot; () if there is none.

    A ticket is done if every shard has applied it. `places`: how many tickets a step has where they are dealt evenly,
    else 0. Where only whole steps are missing, the same workers get them again.
    """
    frontier = max([saved.frontier, *(last + 1 for shard in applied for _, last in shard)])
    absent = Ranges()
    for shard in applied if applied else [saved.done]:
        for first, last in Ranges(shard).missing(0, frontier - 1):
            absent.add(first, last)
    if (num_absent := sum(last - first + 1 for first, last in absent)) > _MOST_ABSENT:
        raise ValueError(f"{num_absent} batches before the last dealt one are not done; that is not a run's")
    if places:
        begun = absent.tuples[0][0] // places * places if absent.tuples else frontier
        if absent.covers(begun, frontier - 1):
            absent, frontier = Ranges(), begun
    again = [number for first, last in absent for number in range(first, last + 1)]
    return Remaining(Ranges(absent.missing(0, frontier - 1)), again, frontier)
