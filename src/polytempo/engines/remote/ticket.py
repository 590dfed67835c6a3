"""`AgentTicket`: the secret with which an agent joins a run. `AgentStarter`: the only difference between engines for
several hosts."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from polytempo.wire.keys import Keys

TICKET_VARIABLE = "POLYTEMPO_TICKET"
_MOST_BYTES = 4096
_FORMAT = "polytempo-ticket-1"


@dataclass(frozen=True)
class AgentTicket:
    """The address at which the head of a run listens, and the run's keys. It is a secret: any process that has it can
    take part.

    It travels on the standard input of an agent, in a file that this user alone can read, or in an agent's environment,
    which this user alone can read as well; never on a command line.
    """

    head: str
    """`tcp://host:port`"""
    keys: Keys
    number: int = -1
    """The agent's; -1 where one ticket is for many."""

    def numbered(self, number: int) -> AgentTicket:
        """The same, for one agent alone."""
        return replace(self, number=number)

    def to_json(self) -> str:
        """The ticket as one line of text."""
        plain = {"format": _FORMAT, "head": self.head, "keys": self.keys.to_plain(), "number": self.number}
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> AgentTicket:
        """The ticket of a text that `to_json` wrote. ValueError for anything else; the message does not show it."""
        try:
            plain = json.loads(text)
            if plain["format"] != _FORMAT:
                raise ValueError("format")
            return cls(plain["head"], Keys.from_plain(plain["keys"]), int(plain["number"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"an agent expects a ticket of a run ({_FORMAT}) as one line on its standard input, and got "
                f"{len(text)} characters that are none; agents are started by `polytempo train --engine …`"
            ) from error

    @classmethod
    def read(cls, path: Path | None = None) -> AgentTicket:
        """The ticket in a file, in POLYTEMPO_TICKET, or on the first line of standard input.

        The variable is removed, so that no process of the run inherits it. ValueError where others can read the file.
        """
        if path is None and (secret := os.environ.pop(TICKET_VARIABLE, None)) is not None:
            return cls.from_json(secret)
        if path is None:
            return cls.from_json(sys.stdin.readline(_MOST_BYTES))
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o007:
                raise ValueError(f"all users can get at the ticket in {path} (mode {mode:04o}); chmod o-rwx it")
            return cls.from_json(file.read(_MOST_BYTES))


@dataclass(eq=False)
class StartedAgent:
    """An agent that is to come, or is there."""

    number: int
    where: str
    """A name for messages: "host n1", "Ray node 3f2a"."""
    ended: str | None = None
    """The agent's end in words, once it has ended."""


class AgentStarter(Protocol):
    """Starts `python -m polytempo.agent` with a ticket, sees agents end, and ends them."""

    @property
    def replaces(self) -> bool:
        """True if `start` may be called again later, for agents that replace lost ones."""

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """Start an agent for each of `numbers`. ValueError where that is impossible."""

    def poll(self) -> None:
        """Bring `ended` of all started agents up to date; it does not wait."""

    def stop(self) -> None:
        """End all agents, politely first, and wait for their end. It may be called twice."""
