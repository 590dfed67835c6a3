"""The mpi engine: an agent on each of some hosts, started by `mpirun` of Open MPI, MPICH or Intel MPI.

    pt.run(job, strategy, workers=8, engine=pt.engines.mpi(hosts=["n1", "n2"]))

MPI starts the agents and does no more: messages between workers travel as on all engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from polytempo.engines.engine import Launch
from polytempo.engines.join.environment import recognise
from polytempo.engines.remote.command_agents import AGENT_WORDS, LaunchedAgents, in_shell
from polytempo.engines.remote.network import check_hosts, common_address
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote
from polytempo.engines.remote.ticket import TICKET_VARIABLE

_LOOPBACK = "127.0.0.1"
_VERSION_S = 30.0
_RANKS = ("Open MPI", "MPICH", "Intel MPI")


@dataclass(frozen=True)
class Mpi:
    """Hosts that `mpirun` reaches, each with polytempo in `python`.

    `hosts` have one agent each. Without them `agents` are started where mpirun places them: on this host, or, in a
    batch system that it knows, in the allocation; then `address` is needed. `options` are more words for mpirun,
    `environment` more variables for agents. The run's keys travel in the environment that mpirun passes on, so they are
    as safe as the network between the hosts and mpirun: see docs/engines.md. `address` is where agents reach this host;
    None: as the system routes. Errors: ValueError for hosts that cannot be, for an mpirun that is not there or of
    another kind, and inside a world that mpirun has started.
    """

    hosts: Sequence[str] = ()
    mpirun: str = "mpirun"
    agents: int = 1
    options: Sequence[str] = ()
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        check_hosts(self.hosts, without=",:", like="mpirun takes them, such as n1")
        if self.agents < 1 or (self.hosts and self.agents not in (1, len(self.hosts))):
            raise ValueError(
                f"agents={self.agents} with hosts={list(self.hosts)}: give hosts, which have one each, or agents >= 1"
            )

    @classmethod
    def from_address(cls, address: str) -> Mpi:
        """The engine of the command line's `mpi` (this host), or `mpi:n1,n2`."""
        return cls(tuple(address.split(","))) if address else cls()

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`. Errors: PolytempoError where an agent is not there within `wait_s`."""
        place = recognise(os.environ)
        if place.launcher in _RANKS and place.size > 1:
            raise ValueError(
                f"this process is rank {place.rank} of {place.size} that {place.launcher} has started, and mpirun does "
                "not start inside itself; leave the engine out to train with these ranks"
            )
        address = self.address or (common_address(self.hosts) if self.hosts else _LOOPBACK)
        num_agents = len(self.hosts) or self.agents
        where = [f"host {host}" for host in self.hosts] or [
            f"process {number} of mpirun" for number in range(num_agents)
        ]
        words = self.words(family(self.mpirun))
        starter = LaunchedAgents(words, where, by_variable=True, environment=self.environment)
        with opened_remote(launch, starter, num_agents, address=address, wait_s=self.wait_s) as engine:
            yield engine

    def words(self, family: str) -> list[str]:
        """The command line, for an mpirun of "Open MPI" or "Hydra"."""
        count = str(len(self.hosts) or self.agents)
        if family == "Open MPI":
            names = [TICKET_VARIABLE, *self.environment]
            passed = [word for name in names for word in ("-x", name)]
            hosts = ["--host", ",".join(self.hosts), "--map-by", "node"] if self.hosts else []
            chosen = ["-n", count, *hosts, "--bind-to", "none", *passed]
        else:  # it passes on all variables, and binds processes to no core
            chosen = ["-n", count, *(["-hosts", ",".join(self.hosts), "-ppn", "1"] if self.hosts else [])]
        return [self.mpirun, *chosen, *self.options, *in_shell([self.python, *AGENT_WORDS])]


def family(mpirun: str) -> str:
    """ "Open MPI", or "Hydra" for MPICH and Intel MPI. ValueError for a program that is neither."""
    try:
        asked = subprocess.run(  # noqa: S603 - the user names it
            [mpirun, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(
            f"mpirun={mpirun!r} cannot be run ({error}); install Open MPI or MPICH (Debian: openmpi-bin, mpich), or "
            "give another's path"
        ) from error
    said = asked.stdout + asked.stderr
    if any(name in said for name in ("Open MPI", "OpenRTE", "PRRTE")):
        return "Open MPI"
    if any(name in said for name in ("HYDRA", "Intel(R) MPI")):
        return "Hydra"
    first = (said.splitlines() or [""])[0]
    raise ValueError(f"mpirun={mpirun!r} is of no known kind ({first!r}); Open MPI, MPICH and Intel MPI are known")
