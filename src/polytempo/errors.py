"""Errors of runs. Wrong arguments are `ValueError` and `TypeError`; of these `Incompatible` has a code."""

from __future__ import annotations

from polytempo.core.calls.refusals import Incompatible
from polytempo.core.errors import (
    Deadlock,
    Drifted,
    JobFailed,
    Mismatch,
    NotFinite,
    PeerLost,
    PolytempoError,
    TimedOut,
)
from polytempo.core.system.folder_lock import FolderTaken
from polytempo.core.system.notice import Preempted
from polytempo.engines.collective import RunTimedOut
from polytempo.engines.processes.failures import WorkerDied
from polytempo.runs.elastic.run_elastic import WorkersLost
from polytempo.server.coordinator.chains import ShardLost

__all__ = [
    "Deadlock",
    "Drifted",
    "FolderTaken",
    "Incompatible",
    "JobFailed",
    "Mismatch",
    "NotFinite",
    "PeerLost",
    "PolytempoError",
    "Preempted",
    "RunTimedOut",
    "ShardLost",
    "TimedOut",
    "WorkerDied",
    "WorkersLost",
]
