"""`LaunchSettings`: where ranks are started, and what they are told."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NOT_EXPORTED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|HOSTNAME|DISPLAY|SSH_.*|XDG_.*|TMPDIR|POLYTEMPO_(RANK|SIZE|LOCAL_.*|RENDEZVOUS)"
)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LaunchSettings:
    """How `horovodrun` starts ranks. ValueError for times that are not positive."""

    start_timeout_s: float = 30.0
    """How long all hosts may take to be there."""
    network_interface: str | None = None
    """Ranks and launcher meet over it; None: as the system routes."""
    ssh: Sequence[str] | None = None
    """The command that starts a process on `{host}`; None: the system's ssh."""
    address: str | None = None
    """Where other hosts reach this one; None: as the system routes."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    output: Path | None = None
    """A folder where each rank's output is kept besides: `rank.0/stdout`, `rank.0/stderr`."""
    timestamps: bool = False
    """Whether each line begins with the time."""
    verbose: bool = False
    python: str = sys.executable
    """The interpreter of the agents on other hosts."""
    exported: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks beside this process's."""

    def __post_init__(self) -> None:
        """Refuse times that no start can keep."""
        if not self.start_timeout_s > 0:
            raise ValueError(f"start-timeout {self.start_timeout_s:g} must be more than 0 seconds")

    def environment(self) -> dict[str, str]:
        """What every rank is told: this process's variables, and those of the options."""
        own = {name: value for name, value in os.environ.items() if not _NOT_EXPORTED.fullmatch(name)}
        return {**own, "PYTHONUNBUFFERED": "1", **self.exported}

    def ssh_command(self) -> tuple[str, ...]:
        """The words before the agent's command."""
        if self.ssh is not None:
            return tuple(self.ssh)
        port = () if self.ssh_port is None else ("-p", str(self.ssh_port))
        key = () if self.ssh_identity_file is None else ("-i", self.ssh_identity_file)
        return ("ssh", "-T", "-o", "BatchMode=yes", *port, *key, "{host}")
