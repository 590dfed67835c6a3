"""Agents and their processes, as the head of a run knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytempo.engines.engine import EngineProcess
from polytempo.engines.remote.messages import AgentBeat, Hello, StartProcess, StopProcess


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
