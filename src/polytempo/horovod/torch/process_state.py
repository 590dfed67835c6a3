"""`PROCESS`: the state that Horovod's functions share between two calls. Its API passes none as an argument."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from polytempo.horovod.elastic_place import LIFE, MEETING, ElasticPlace
from polytempo.horovod.runtime.operation import Operation
from polytempo.horovod.runtime.session import Session
from polytempo.horovod.torch.process_sets import ProcessSet


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
