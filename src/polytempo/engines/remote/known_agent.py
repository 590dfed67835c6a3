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
    """Whether `poll` has said that it has ended."""
    order: StartProcess | None = None
    """What its agent was told."""
    ending: bool = False
    """Whether its agent was told to end it."""


@dataclass(eq=False)
class Agent:
    """An agent, as the head knows it."""

    number: int
    peer: bytes
    hello: Hello
    host: int
    """By number, in the order in which hosts were first heard of."""
    heard_s: float
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    """Those that run, by life."""
    lost: str | None = None
    """Why it is lost, in words."""
    left: bool = False
    leaving: bool = False
    """Whether its host was asked to leave."""

    def heard(self, beat: AgentBeat) -> list[StartProcess | StopProcess]:
        """Take over what it says of its processes. Returns the orders that have not reached it, to be given again."""
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
