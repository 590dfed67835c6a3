"""A round that goes on: its clients in training, and their answers."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polytempo.report.status.client_rounds import round_text
from polytempo.runs.clients.client_messages import digest, packed
from polytempo.runs.clients.sum_round import SumRound
from polytempo.training.federated.remote_rounds import ClientAnswer, RoundTask
from polytempo.training.observe.user_log import user_log


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


class RoundLost(Exception):
    """Too few clients have answered a round, or stayed in its secure sums."""

    def __init__(self, found: int, when: str, needed: int) -> None:
        self.found, self.when, self.needed = found, when, needed


@dataclass
class OpenRound:
    """A round that goes on."""

    task: RoundTask
    most: int
    """Answers that end it."""
    order: str = ""
    """The digest of the clients' order."""
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
    counted: set[tuple[bytes, int]] = field(default_factory=set)
    """Connections of asked clients, and the rounds of their orders: another process trains again."""
    sum: SumRound | None = None
    """The secure sum of the answers."""
    failed: list[int] = field(default_factory=list)
    """Secure sums that cannot be opened."""
    asked_to_open: set[int] = field(default_factory=set)
    """Clients that may have given shares of secure sums that this server has not opened."""
    opened_before: bool = False
    """A lost server may have opened a sum of this round."""

    @property
    def number(self) -> int:
        """The round's."""
        return self.task.number

    @property
    def draw(self) -> int:
        """The number of the secure sum, or 0."""
        return 0 if self.sum is None else self.sum.draw

    @property
    def found(self) -> list[int]:
        """Clients that have answered, in the order of draws."""
        return [each for each in self.drawn if each in self.answers]

    @property
    def goes_on(self) -> bool:
        """True where asked clients are waited for."""
        return len(self.answers) < self.most or (self.sum is not None and self.sum.phase > 0)

    def fewest(self, answers: int) -> int:
        """The answers that are enough, of so many in a round without secure sums."""
        secure = None if self.task.sum is None else self.task.sum.secure
        return answers if secure is None else max(2, answers, secure.threshold or 0)

    def summed(self, clients: Collection[int]) -> float:
        """Leave the answers of clients in a sum; the scale of their weights there, which counted lost ones, too."""
        weights = self._weights()
        self.answers = {each: answer for each, answer in self.answers.items() if each in clients}
        first = self.found[0]
        return weights[first] / self._weights()[first] if len(clients) < len(weights) else 1.0

    def _weights(self) -> dict[int, float]:
        """Weights of clients that have answered, as each of them makes its own."""
        assert self.task.sum is not None
        return dict(zip(self.found, self.task.sum.shares([self.answers[each] for each in self.found]), strict=True))


def note_round(opened: OpenRound, found: Sequence[int], there: int, clients: int, buffering: bool) -> None:
    """Log a round's clients and numbers. `there`: connected ones of `clients`."""
    ages = {each: opened.answers[each].age for each in found}
    user_log().note_round(round_text(opened.number, clients, ages))
    values = {"clients/there": float(there), "clients/refused": float(len(opened.out))}
    values |= {"clients/sent_bytes": float(opened.sent_bytes)}
    values |= {"clients/received_bytes": float(opened.received_bytes)}
    if buffering:
        age = sum(ages.values()) / len(ages)
        values |= {"clients/age": age, "clients/too_old": float(opened.too_old)}
    user_log().log(values)


def say(text: str) -> None:
    """Tell an event of a round: in the run's stream, and on standard error."""
    print(f"polytempo: {text}", file=sys.stderr)
    user_log().log_text("clients", text)


def sent_round(task: RoundTask) -> SentRound:
    """The round for clients."""
    content = packed(task.tensors)
    return SentRound(content, digest(content), list(task.rates))
