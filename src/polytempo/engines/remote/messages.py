"""Messages between the head of a run, in the launcher, and the agents on hosts, and the head's records of agents.

Messages are msgpack, never pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from polytempo.engines.engine import EngineProcess, Launch
from polytempo.spec.topology import Topology

ECHO = "POLYTEMPO_ECHO_LOGS"
"""The variable of the environment that makes an agent write its processes' logs to its standard error, too."""
SAVE_S = 15.0
"""An agent that has lost the head lets copies of shards save for so long, before it ends them."""


class Hello(Struct, tag="hello", frozen=True):
    """An agent is there."""

    number: int
    """The number with which it was started; -1 if its launcher could not tell."""
    host: str
    """Equal for agents on one host, and for no others."""
    name: str
    """The host's name, for people."""
    address: str
    """An address of this host that the head reaches."""
    cores: int


class AgentBeat(Struct, tag="beat", frozen=True):
    """An agent lives; `stopped` of its processes are held by a signal.

    A connection that breaks loses its messages, in both directions: an order for a process that is not among `running`
    is given again, and so is an order to stop a process that is.
    """

    stopped: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    """The lives of all its processes."""
    leaving: bool = False
    """True once its host was asked to leave."""


class LogLines(Struct, tag="log", frozen=True):
    """The new output of process `life`."""

    life: int
    text: bytes


class Ended(Struct, tag="ended", frozen=True):
    """Process `life` has ended: see `EngineProcess`."""

    life: int
    exit_code: int
    result: bytes | None = None
    failure: tuple[str, bool, str, dict[str, Any] | None] | None = None
    why: str = ""


class Bye(Struct, tag="bye", frozen=True):
    """An agent has ended all its processes, and ends."""


FromAgent = Hello | AgentBeat | LogLines | Ended | Bye


class Welcome(Struct, tag="welcome", frozen=True):
    """The run, with `number` as the agent's number."""

    number: int
    spec: str
    """`RunSpec.to_json()`, or the description of a user's own loop."""
    most: int
    """`Launch.most`"""
    threads: int
    """The threads of each process."""
    pieces: int = 0
    """So many `RunData` messages follow."""


class RunData(Struct, tag="data", frozen=True):
    """A part of the bytes that belong to the run's text; in order."""

    data: bytes


class StartProcess(Struct, tag="start", frozen=True):
    """Start a process, once; where it has been started and has ended, say again how."""

    role: dict[str, Any]
    """`Role._asdict()`"""
    setting: str
    """`Launch.setting()`, as JSON"""
    local_rank: int
    """The number among the workers of its host; 0 for others."""
    local_size: int
    host: int


class StopProcess(Struct, tag="stop", frozen=True):
    """End process `life` for certain and immediately."""

    life: int


class AskWhere(Struct, tag="where", frozen=True):
    """Let process `life` write into its log where it is."""

    life: int


class PreemptAll(Struct, tag="leave", frozen=True):
    """The run has to leave soon: let all processes save and end."""


class Close(Struct, tag="close", frozen=True):
    """The run is over: end all processes, politely first, and leave."""


ToAgent = Welcome | RunData | StartProcess | StopProcess | AskWhere | PreemptAll | Close


PIECE_BYTES = 32 << 20
"""So many bytes travel in one message."""


class TravellingRun(NamedTuple):
    """The description of a run for agents."""

    text: str
    topology: Topology
    data: bytes = b""

    @classmethod
    def of(cls, launch: Launch) -> TravellingRun:
        """A job's. ValueError where it cannot travel."""
        if launch.spec is None:
            raise ValueError("a function cannot travel to other hosts; give engine=pt.engines.local()")
        return cls(launch.spec.to_json(), launch.spec.topology())

    def messages(self, number: int, most: int, threads: int) -> Iterator[ToAgent]:
        """A `Welcome` for agent `number`, and its pieces."""
        starts = range(0, len(self.data), PIECE_BYTES)
        yield Welcome(number, self.text, most, threads, len(starts))
        for start in starts:
            yield RunData(self.data[start : start + PIECE_BYTES])


@dataclass(eq=False)
class RemoteProcess(EngineProcess):
    """A process that an agent has started, or shall start."""

    agent: Agent | None = None
    collected: bool = False
    """True once `poll` has reported its end."""
    order: StartProcess | None = None
    """The order that its agent received."""
    ending: bool = False
    """True once its agent was asked to end it."""


@dataclass(eq=False)
class Agent:
    """An agent, as the head knows it."""

    number: int
    peer: bytes
    hello: Hello
    host: int
    """The number, in the order of the hosts' first messages."""
    heard_s: float
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    """The running processes by life."""
    lost: str | None = None
    """The reason for its loss, in words."""
    left: bool = False
    leaving: bool = False
    """True once its host was asked to leave."""

    def heard(self, beat: AgentBeat) -> list[StartProcess | StopProcess]:
        """Take over an agent's report about its processes. Returns the orders that have not reached it, to be given
        again."""
        self.leaving = beat.leaving
        again: list[StartProcess | StopProcess] = []
        for life in beat.running:
            if life not in self.processes or self.processes[life].ending:
                again.append(StopProcess(life))
        for life, process in self.processes.items():
            process.stopped = life in beat.stopped
            if life not in beat.running and process.order is not None:
                again.append(process.order)
        return again
