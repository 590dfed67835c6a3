"""A round that goes on: its clients in training, and their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from polytempo.runs.clients.client_messages import digest, packed
from polytempo.training.federated.remote_rounds import ClientAnswer, RoundTask


class SentRound(NamedTuple):
    """A round as clients get it."""

    content: bytes
    mark: str
    rates: list[float]


@dataclass
class AskedClient:
    """A client in training."""

    number: int
    """The round that it began in."""
    until_s: float
    """The time when it is late."""
    broke_s: float = math.inf
    """The time when its connection broke (inf: it is there)."""
    late: bool = False


@dataclass
class OpenRound:
    """A round that goes on."""

    task: RoundTask
    most: int
    """Answers that end it."""
    drawn: list[int] = field(default_factory=list)
    """Clients in the order of draws."""
    answers: dict[int, ClientAnswer] = field(default_factory=dict)
    out: dict[int, str] = field(default_factory=dict)
    """Refused clients, and why."""
    old: set[int] = field(default_factory=set)
    """Clients that have sent a movement of another round in this one."""
    sent_bytes: int = 0
    """Tensors to clients."""
    received_bytes: int = 0
    """Tensors of answers that count."""
    too_old: int = 0
    """Movements of an age that does not count."""

    @property
    def number(self) -> int:
        """The round's."""
        return self.task.number


def sent_round(task: RoundTask) -> SentRound:
    """The round for clients."""
    content = packed(task.tensors)
    return SentRound(content, digest(content), list(task.rates))
