"""`TraceTail`: the last operations of a rank in a file, for pages that watch the run.

Trace ──▶ .tails/0.json, .tails/1.json …, replaced every few seconds ──▶ timeline and topology of a run that goes on
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.worlds.trace import Event

MOST_TAILS = 64
"""Ranks with a tail: a page shows no more."""
EVERY_S, _FIRST_S = 5.0, 1.0
_MOST_OF_RANK, _MOST_OF_ALL = 500, 4_000
_MOST_BYTES = 1 << 22
_EVENTS = msgspec.json.Decoder(list[Event])


class TraceTail:
    """Replaces `path` by the last `most` events, one second after its making and then every five seconds.

    Cost: 0.6 ms for 500 events, so 0.012 % of the rank's time (benchmarks/watching). Where the file cannot be written,
    the run goes on without it.
    """

    def __init__(self, path: Path, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._path, self._clock = most, path, clock
        self._at_s = clock() + _FIRST_S

    @property
    def rest_s(self) -> float:
        """Seconds until it is written again."""
        return self._at_s - self._clock()

    def show(self, events: list[Event]) -> None:
        """Write these events."""
        self._at_s = self._clock() + EVERY_S
        with suppress(OSError):
            with suppress(FileExistsError):
                self._path.parent.mkdir()  # not its parents: on another host the run's folder may be missing
            if files.is_folder(self._path.parent):
                files.replace(self._path, msgspec.json.encode(events))


def tail_of(out: Place | None, rank: int, *, all_ranks: bool = False) -> TraceTail | None:
    """The tail of `rank` in the run's folder `out`; `all_ranks`: of the one trace of a simulation.

    None without a folder on this machine, and for ranks from 64 on.
    """
    if not isinstance(out, Path) or rank >= MOST_TAILS:
        return None
    return TraceTail(out / files.TAILS / f"{rank}.json", _MOST_OF_ALL if all_ranks else _MOST_OF_RANK)


def read_tail(path: Path) -> list[Event]:
    """The events in a tail. ValueError or OSError where it is not one."""
    return _EVENTS.decode(files.read(path, _MOST_BYTES))
