"""The ssh engine: an agent on each host of a list, started through the system's ssh.

    pt.run(job, strategy, workers=8, engine=pt.engines.ssh(hosts=["n1", "n2"]))

It is the one engine that starts processes on other hosts by itself; all others let a cluster's own system do it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polytempo.engines.engine import Launch
from polytempo.engines.remote.child_agents import ChildAgents
from polytempo.engines.remote.network import common_address
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "{host}")
_AGENT = ("-P", "-m", "polytempo.agent")


@dataclass(frozen=True)
class Ssh:
    """Hosts that ssh reaches without a question, each with polytempo in `python`.

    The run's keys travel on the standard input of ssh, inside its encryption. `command` is what starts a process on
    `{host}`; `python` and `environment` are of the hosts. `environment` is on ssh's command line, which all users of
    this host can read: put no secrets there. `address` is where hosts reach this one; None: as the system
    routes. Errors: ValueError for no hosts, a host twice, or a name that ssh would take for an option.
    """

    hosts: Sequence[str]
    python: str = "python3"
    command: Sequence[str] = _SSH
    address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what cannot be a list of hosts."""
        if isinstance(self.hosts, str) or not self.hosts:
            raise ValueError(f'hosts={self.hosts!r} must be a list of names, such as ["n1", "n2"]')
        for host in self.hosts:
            if not host or host.startswith("-") or any(letter.isspace() for letter in host):
                raise ValueError(f"{host!r} is no host's name; give names as ssh takes them, such as n1 or user@n1")
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts={list(self.hosts)} names a host twice; each has one agent, which starts all there")
        if not any("{host}" in word for word in self.command):
            raise ValueError(f"command={list(self.command)} must have the word {{host}}")

    @classmethod
    def from_address(cls, address: str) -> Ssh:
        """From the command line's `ssh:n1,n2`."""
        if not address:
            raise ValueError("name the hosts: --engine ssh:n1,n2")
        return cls(tuple(address.split(",")))

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`. Errors: PolytempoError where a host is not there within `wait_s`."""
        address = self.address or common_address(host.rpartition("@")[2] for host in self.hosts)
        starter = ChildAgents([(f"host {host}", self.agent_words(host)) for host in self.hosts])
        with opened_remote(launch, starter, len(self.hosts), address=address, wait_s=self.wait_s) as engine:
            yield engine

    def agent_words(self, host: str) -> list[str]:
        """The command that starts the agent on `host`."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        there = [*(["env", *settings] if settings else []), self.python, *_AGENT]
        if Path(self.command[0]).name == "ssh":  # it hands all words to a shell
            there = [shlex.quote(word) for word in there]
        return [word.replace("{host}", host) for word in self.command] + there
