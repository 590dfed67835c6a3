"""`AgentStarter`: starts agents where an engine's hosts are. It is all in which engines for several hosts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from polytempo.engines.remote.ticket import AgentTicket


@dataclass(eq=False)
class StartedAgent:
    """An agent that is to come, or is there."""

    number: int
    where: str
    """For messages: "host n1", "Ray node 3f2a"."""
    ended: str | None = None
    """How it ended, in words, once it has."""


class AgentStarter(Protocol):
    """Starts `python -m polytempo.agent` with a ticket, sees agents end, and ends them."""

    @property
    def replaces(self) -> bool:
        """Whether `start` may be called again later, for agents that take lost ones' places."""

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """Start an agent for each of `numbers`. ValueError where that is impossible."""

    def poll(self) -> None:
        """Bring `ended` of all started agents up to date; it does not wait."""

    def stop(self) -> None:
        """End all agents, politely first, and wait for their end. It may be called twice."""
