"""Agents and their processes, as the head of a run knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytempo.engines.engine import EngineProcess
from polytempo.engines.remote.messages import Hello


@dataclass(eq=False)
class RemoteProcess(EngineProcess):
    """A process that an agent has started, or shall start."""

    agent: Agent | None = None
    collected: bool = False
    """Whether `poll` has said that it has ended."""


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
