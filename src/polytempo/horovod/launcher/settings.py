"""`LaunchSettings`: where ranks are started, and their environment. `ElasticSettings`: the bounds of an elastic run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_NOT_EXPORTED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|HOSTNAME|DISPLAY|SSH_.*|XDG_.*|TMPDIR|POLYTEMPO_(RANK|SIZE|LOCAL_.*|RENDEZVOUS)"
)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LaunchSettings:
    """The launch of ranks by `horovodrun`. ValueError for times that are not positive."""

    start_timeout_s: float = 30.0
    """All hosts may take so long to be there."""
    network_interface: str | None = None
    """Ranks and launcher meet over it; None: as the system routes."""
    ssh: Sequence[str] | None = None
    """The command that starts a process on `{host}`; None: the system's ssh."""
    address: str | None = None
    """The address of this host for others; None: as the system routes."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    output: Path | None = None
    """A folder with a further copy of each rank's output: `rank.0/stdout`, `rank.0/stderr`."""
    timestamps: bool = False
    """True to begin each line with the time."""
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
        """The environment of every rank: this process's variables, and the options' variables."""
        own = {name: value for name, value in os.environ.items() if not _NOT_EXPORTED.fullmatch(name)}
        return {**own, "PYTHONUNBUFFERED": "1", **self.exported}

    def ssh_command(self) -> tuple[str, ...]:
        """The words before the agent's command."""
        if self.ssh is not None:
            return tuple(self.ssh)
        port = () if self.ssh_port is None else ("-p", str(self.ssh_port))
        key = () if self.ssh_identity_file is None else ("-i", self.ssh_identity_file)
        return ("ssh", "-T", "-o", "BatchMode=yes", *port, *key, "{host}")


_MOST = 4096


class ElasticSettings(NamedTuple):
    """Make it by `of`, which checks it."""

    num_proc: int
    minimum: int
    maximum: int
    timeout_s: float = 600.0
    """`minimum` processes are awaited for so long."""
    reset_limit: int | None = None
    """The run ends after so many changes of the group; None: after any number."""
    cooldown_s: tuple[float, float] | None = None
    """See `HostSlots`."""

    @classmethod
    def of(
        cls,
        num_proc: int | None,
        minimum: int | None,
        maximum: int | None,
        *,
        timeout_s: float = 600.0,
        reset_limit: int | None = None,
        cooldown_s: Sequence[float] | None = None,
    ) -> ElasticSettings:
        """Missing values follow from the others. ValueError for bounds that no run can keep."""
        first = num_proc or minimum or 1
        least, most = minimum or first, maximum or _MOST
        if not 1 <= least <= first <= most <= _MOST:
            raise ValueError(
                f"an elastic run has 1 <= min-np <= np <= max-np <= {_MOST}, got {least}, {first} and {most}"
            )
        if not timeout_s > 0 or (reset_limit is not None and reset_limit < 1):
            raise ValueError(
                f"elastic-timeout {timeout_s:g} must be more than 0 seconds, and reset-limit {reset_limit} at least 1"
            )
        if cooldown_s is not None and not (len(cooldown_s) == 2 and 0 < cooldown_s[0] <= cooldown_s[1]):
            raise ValueError(
                f"blacklist-cooldown-range {list(cooldown_s)} must be two numbers of seconds: the shortest, the longest"
            )
        cooldown = None if cooldown_s is None else (float(cooldown_s[0]), float(cooldown_s[1]))
        return cls(first, least, most, timeout_s, reset_limit, cooldown)
