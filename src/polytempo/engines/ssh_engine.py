"""The ssh engine: an agent on each host of a list, started through the system's ssh.

    pt.run(job, strategy, workers=8, engine=pt.engines.ssh(hosts=["n1", "n2"]))

It is the one engine that starts processes on other hosts without help; all others use a cluster's own system.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polytempo.engines.engine import Launch
from polytempo.engines.remote.command_agents import AGENT_WORDS, ChildAgents
from polytempo.engines.remote.network import check_hosts, common_address
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "{host}")
_READ = 'IFS= read -r polytempo_line && eval "$polytempo_line" && unset polytempo_line && exec "$@"'
_WITH_SETTINGS = ("sh", "-c", _READ, "sh")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_SETTINGS_BYTES = 48 << 10
"""A pipe holds as many and the ticket, so that no write waits for a host."""


@dataclass(frozen=True)
class Ssh:
    """Hosts that ssh reaches without a question, each with polytempo in `python`.

    The run's keys travel on the standard input of ssh, inside its encryption. `command` starts a process on `{host}`;
    `python` and `environment` belong to the hosts. `environment` travels on standard input, too, and `sh` there reads
    it: no value is on a command line. `address` is where hosts reach this one; None: as the system routes. Errors:
    ValueError for no hosts, a host twice, a name that ssh would take for an option, or an environment that no shell can
    set.
    """

    hosts: Sequence[str]
    python: str = "python3"
    command: Sequence[str] = _SSH
    address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        check_hosts(self.hosts, like="ssh takes them, such as n1 or user@n1")
        if not self.hosts:
            raise ValueError(f'hosts={self.hosts!r} must be a list of names, such as ["n1", "n2"]')
        if not any("{host}" in word for word in self.command):
            raise ValueError(f"command={list(self.command)} must have the word {{host}}")
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"environment: no shell can set {name}={value!r}; a name is letters, digits and _")
        if len(self._settings_line()) > _MOST_SETTINGS_BYTES:
            raise ValueError(
                f"environment must be at most {_MOST_SETTINGS_BYTES} bytes; write the rest to a file there"
            )

    @classmethod
    def from_address(cls, address: str) -> Ssh:
        """The engine of the command line's `ssh:n1,n2`."""
        if not address:
            raise ValueError("name the hosts: --engine ssh:n1,n2")
        return cls(tuple(address.split(",")))

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`. Errors: PolytempoError where a host is not there within `wait_s`."""
        address = self.address or common_address(host.rpartition("@")[2] for host in self.hosts)
        with opened_remote(launch, self.starter(), len(self.hosts), address=address, wait_s=self.wait_s) as engine:
            yield engine

    def starter(self) -> ChildAgents:
        """Starts the agents, each by its host's command."""
        return ChildAgents([(f"host {host}", self._agent_words(host)) for host in self.hosts], self._settings_line())

    def _agent_words(self, host: str) -> list[str]:
        there = [*(_WITH_SETTINGS if self.environment else ()), self.python, *AGENT_WORDS]
        if any(Path(word).name == "ssh" for word in self.command):  # it hands all words to a shell
            there = [shlex.quote(word) for word in there]
        return [word.replace("{host}", host) for word in self.command] + there

    def _settings_line(self) -> bytes:
        """`environment` as the one line that `_READ` evaluates: line feeds are in a variable."""
        if not self.environment:
            return b""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        settings = "export " + " ".join(words).replace("\n", "'\"$polytempo_line\"'")
        return os.fsencode(f"polytempo_line=$(printf '\\n_'); polytempo_line=${{polytempo_line%_}}; {settings}\n")
