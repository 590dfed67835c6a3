"""`RankProcess`: the process of a rank, as its peers know it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from polytempo.core.system.first_failure import FirstFailure


class RankProcess(NamedTuple):
    """The process of a rank, as its peers know it."""

    rank: int
    host: str
    """The name of its host."""
    machine: str
    """Equal for processes of one host and of one view of its processes, and for no others."""
    pid: int
    log: str
    """The file of its standard error, or words for it."""

    @classmethod
    def of_this(cls, rank: int, machine: str) -> RankProcess:
        """This process."""
        return cls(rank, socket.gethostname(), machine, os.getpid(), _own_log())

    def as_json(self) -> bytes:
        """The process for `from_json`."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankProcess:
        """The process again."""
        facts: Mapping[str, Any] = json.loads(text)
        return cls(**facts)

    def died(self, size: int, cause: str) -> FirstFailure:
        """The death of this process, one of `size` ranks."""
        return FirstFailure(f"rank {self.rank} of {size}", cause, self.rank, self.host, self.log)


def _own_log() -> str:
    """The file behind the standard error, or words for it."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        path = ""
    if path.startswith("/") and os.path.isfile(path):
        return path
    return f"the standard error of process {os.getpid()}"
