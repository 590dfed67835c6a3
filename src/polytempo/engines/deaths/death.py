"""`Death`: the first process of a run that failed, and the line that names it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from polytempo.spec.text.plain_text import plain_text

MOST_SAID = 400
"""Characters of an exception's message that are kept."""
BEGIN = "first failure: "


class Death(NamedTuple):
    """The first failure of a run: who, where, why, and the log to read."""

    who: str
    """The process: "rank 1 of 4", "worker-2"."""
    cause: str
    """A verb and its circumstances: "was killed by SIGKILL", "raised ValueError: …"."""
    rank: int | None = None
    host: str = ""
    """The host's name; "" where it is not known."""
    log: str = ""
    """The path of the process's log, or words for the place of its output."""

    def __str__(self) -> str:
        """The line: `first failure: rank 1 of 4 on n2 was killed by SIGKILL; read runs/a/logs/rank-1.log`."""
        where = f" on {self.host}" if self.host else ""
        read = f"; read {self.log}" if self.log else ""
        return plain_text(f"{BEGIN}{self.who}{where} {self.cause}{read}")

    def as_json(self) -> bytes:
        """The death for `from_json`."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Death:
        """The death again. ValueError for other text."""
        facts = json.loads(text)
        if not isinstance(facts, dict) or facts.keys() != set(cls._fields):
            raise ValueError("it is not a death")
        return cls(**facts)


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

    def died(self, size: int, cause: str) -> Death:
        """The death of this process, one of `size` ranks."""
        return Death(f"rank {self.rank} of {size}", cause, self.rank, self.host, self.log)


def raised(error: BaseException) -> str:
    """The cause of a process that ended with `error`."""
    said = in_short(error)
    return f"raised {type(error).__name__}{f': {said}' if said else ''}"


def in_short(error: BaseException) -> str:
    """The exception's message on one line, and not too long."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # a user's exception that has no text
        return ""
    return said if len(said) <= MOST_SAID else f"{said[: MOST_SAID - 1]}…"


def _own_log() -> str:
    """The file behind the standard error, or words for it."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        path = ""
    if path.startswith("/") and os.path.isfile(path):
        return path
    return f"the standard error of process {os.getpid()}"
