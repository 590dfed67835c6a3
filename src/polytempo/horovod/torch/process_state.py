"""`PROCESS`: the state that Horovod's functions share between two calls. Its API passes none as an argument."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

from polytempo.horovod.elastic_place import LIFE, MEETING, ElasticPlace
from polytempo.horovod.runtime.operation import Operation
from polytempo.horovod.runtime.session import Session


class ProcessSet:
    """Ranks that perform operations among themselves, given as `ProcessSet([0, 1])`.

    Hand it to `init(process_sets=[…])` or to `add_process_set`; from then on it has a `process_set_id`.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            self.ranks: list[int] | None = sorted(index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise ValueError(
                f"a process set is given as a list of ranks, got {ranks_or_comm!r}; communicators of MPI are not "
                "supported, as no MPI takes part here"
            ) from None
        self.process_set_id: int | None = None
        self._own_rank = -1

    def size(self) -> int:
        """The number of its ranks."""
        return len(self._known())

    def rank(self) -> int:
        """This process's place among them. ValueError where it is not one of them."""
        ranks = self._known()
        if self._own_rank not in ranks:
            raise ValueError(f"rank {self._own_rank} is not in the process set {ranks}")
        return ranks.index(self._own_rank)

    def included(self) -> bool:
        """True if this process is one of them."""
        return self._own_rank in self._known()

    def bind(self, number: int, ranks: Sequence[int], own_rank: int) -> None:
        """Register it. Called by `init` and `add_process_set`."""
        self.process_set_id, self.ranks, self._own_rank = number, sorted(ranks), own_rank

    def unbind(self) -> None:
        """Take note of its removal."""
        self.process_set_id = None

    def _known(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} is not registered; call init(process_sets=[…]) or add_process_set first")
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class Outstanding(NamedTuple):
    """An operation under way, and the function that makes its answer once it is done."""

    operation: Operation
    answer: Callable[[Operation], Any]


class ProcessState:
    """One process's Horovod. Counters run on over sessions: all ranks count alike."""

    def __init__(self) -> None:
        self.session: Session | None = None
        """None before `init` and after `shutdown`."""
        self.everyone = ProcessSet([])
        """The set of all ranks, without ranks before `init`."""
        self.everyone.ranks = None
        self.sets: list[ProcessSet] = []
        """The other registered sets."""
        self.outstanding: dict[int, Outstanding] = {}
        """Operations under way, by handle."""
        self.handle_numbers = itertools.count()
        self.session_numbers = itertools.count()
        self.change_numbers = itertools.count()
        """Numbers of additions and removals of process sets."""
        self.layer_numbers = itertools.count()
        """Numbers of layers with statistics of all ranks."""
        self._place: ElasticPlace | None = None

    @property
    def place(self) -> ElasticPlace | None:
        """The place in an elastic run; None if no elastic launcher has started this process."""
        if self._place is None and MEETING in os.environ:
            self._place = ElasticPlace(os.environ[MEETING], int(os.environ[LIFE]))
        return self._place

    def opened(self) -> Session:
        """The session that is open. Errors: ValueError before `init`."""
        if self.session is None:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return self.session


PROCESS = ProcessState()
global_process_set = PROCESS.everyone
"""The set of all ranks."""
