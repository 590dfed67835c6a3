"""`StoreBoard`: the snapshots of ranks in the store of the process group, where no rank waits for another."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from polytempo.core import Strategy
from polytempo.diagnosis.host_sample import host_sample
from polytempo.diagnosis.pace import PaceSnapshot
from polytempo.training.step.pace_watch import PaceMeeting, PaceWatch
from polytempo.worlds import ProcessWorld

LEAST_LOST_S = 0.005
"""A rank that loses less than this in a step is not named: on a busy host that is noise."""
BEHIND = True
"""A thread talks to the store: on busy processors an answer takes milliseconds."""
_MOST_RANKS = 1024
_decode = msgspec.json.Decoder(PaceSnapshot).decode


class StoreBoard:
    """A board of `size` ranks. Cost: two short requests to the store a snapshot; rank 0 reads all of them in one."""

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = store, size
        self._keys = [str(rank) for rank in range(size)]
        self._complete = False

    def put(self, rank: int, snapshot: PaceSnapshot) -> None:
        """See `PaceBoard`."""
        self._store.set(str(rank), msgspec.json.encode(snapshot).decode())

    def read(self) -> Mapping[int, PaceSnapshot]:
        """See `PaceBoard`."""
        self._complete = self._complete or self._store.check(self._keys)  # to get a key that is missing would wait
        if not self._complete:
            return {}
        several = getattr(self._store, "has_extended_api", bool)()
        found = self._store.multi_get(self._keys) if several else [self._store.get(key) for key in self._keys]
        return {rank: _decode(text) for rank, text in enumerate(found)}

    def ask(self, rank: int, slower: float) -> None:
        """See `PaceBoard`."""
        number = (self.asked(rank) or (0, 0.0))[0] + 1
        self._store.set(f"ask {rank}", msgspec.json.encode((number, slower)).decode())

    def asked(self, rank: int) -> tuple[int, float] | None:
        """See `PaceBoard`."""
        if not self._store.check([f"ask {rank}"]):
            return None
        return msgspec.json.decode(self._store.get(f"ask {rank}"), type=tuple[int, float])


class ProcessClock:
    """The times of a real rank."""

    def __init__(self, world: ProcessWorld) -> None:
        self._world = world

    def now_s(self) -> float:
        """See `PaceClock`."""
        return self._world.now_s()

    def busy_s(self) -> float:
        """See `PaceClock`."""
        return self._world.now_s() - self._world.waited_s

    def waited_s(self) -> float:
        """See `PaceClock`."""
        return self._world.waited_s


def watch_pace(
    world: ProcessWorld, strategy: Strategy, series: int, stage: int | None = None, *, compares: bool = True
) -> PaceWatch:
    """The watch of this rank of `world`. `series`: the model's number in its world. `stage`: of a pipeline. `compares`:
    False if ranks only count their seconds.

    Ranks that compute unequal numbers of slices are not compared, nor ranks in groups of more than 1,024.
    """
    meeting = None
    if compares and 1 < world.size <= _MOST_RANKS and strategy.slices is None:
        rank = f"rank {world.rank}"
        try:
            store = PrefixStore(f"polytempo/pace/{series}", _get_default_store())
        except (ValueError, RuntimeError):  # no process group: the ranks meet in another way
            return PaceWatch(None, ProcessClock(world))
        meeting = PaceMeeting(
            StoreBoard(store, world.size),
            world.rank,
            world.size,
            who=rank if stage is None else f"stage {stage} ({rank})",
            host=socket.gethostname() if len(set(world.port.hosts)) > 1 else "",
            samples=host_sample,
            least_lost_s=LEAST_LOST_S,
        )
    return PaceWatch(meeting, ProcessClock(world), behind=BEHIND, tell=say_slow)


def say_slow(row: Mapping[str, Any]) -> None:
    """Print the diagnosis; a loop of one's own has no other place for it."""
    print(f"polytempo: {row['text']}", file=sys.stderr)
