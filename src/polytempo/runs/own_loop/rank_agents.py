"""The agents that ranks hold which serve: they wait for a ticket, and rank 0 hands it on.

LoopServer ── ticket, or its file ──▶ rank 0 ── the launcher's store ──▶ ranks that serve ──▶ agents ──▶ LoopServer
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from polytempo.engines.remote.starter import StartedAgent
from polytempo.engines.remote.ticket import AgentTicket


class RankAgents:
    """See `AgentStarter`. `hand_over(text)` reaches all of `ranks`, and `engines.join.server_ranks` reads it.

    `folder`: a private one of this host, where all of them are on it; else the ticket travels, or, where they
    `have_keys`, the head's address alone.
    """

    replaces = False

    def __init__(
        self, ranks: Sequence[int], hand_over: Callable[[str], None], folder: Path | None, *, have_keys: bool
    ) -> None:
        self._ranks, self._hand_over, self._folder, self._have_keys = ranks, hand_over, folder, have_keys

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """See `AgentStarter`."""
        self._hand_over(self._text(ticket))
        return [StartedAgent(number, f"server (rank {self._ranks[number]})") for number in numbers]

    def poll(self) -> None:
        """Their ends are not seen here: the head misses an agent."""

    def stop(self) -> None:
        """They end by themselves when the head says so, or is gone."""

    def _text(self, ticket: AgentTicket) -> str:
        if self._have_keys:
            return ticket.head
        if self._folder is None:
            return ticket.to_json()
        path = self._folder / "ticket"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(ticket.to_json())
        return str(path)
