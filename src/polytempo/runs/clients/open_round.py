"""A round that goes on: its clients in training, and their answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polytempo.runs.clients.client_messages import digest, packed
from polytempo.runs.clients.sum_round import SumRound
from polytempo.runs.clients.tickets import name_of
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
    counted: set[tuple[bytes, int]] = field(default_factory=set)
    """Connections of asked clients, and the rounds of their orders: another process trains again."""
    sum: SumRound | None = None
    """The secure sum of the answers."""
    failed: list[int] = field(default_factory=list)
    """Secure sums that cannot be opened."""

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

    def weights(self, clients: Sequence[int]) -> dict[int, float]:
        """Weights of clients that have answered, in a sum of their movements."""
        assert self.task.sum is not None
        answers = [self.answers[each] for each in clients]
        return dict(zip(clients, self.task.sum.shares(answers), strict=True))

    def summed(self, clients: Collection[int], weights: Mapping[int, float]) -> float:
        """Leave the answers of clients in a sum; the scale of their `weights` there, which counted lost ones, too."""
        self.answers = {each: answer for each, answer in self.answers.items() if each in clients}
        first = self.found[0]
        return weights[first] / self.weights(self.found)[first] if len(clients) < len(weights) else 1.0


def note_round(opened: OpenRound, found: Sequence[int], there: int, buffering: bool) -> None:
    """Log a round's clients and numbers."""
    ages = {each: opened.answers[each].age for each in found}
    names = " ".join(name_of(each) + (f" (age {age})" if age else "") for each, age in ages.items())
    user_log().log_text("clients/round", f"round {opened.number}: {names}")
    values = {"clients/there": float(there), "clients/refused": float(len(opened.out))}
    values |= {"clients/sent_bytes": float(opened.sent_bytes)}
    values |= {"clients/received_bytes": float(opened.received_bytes)}
    if buffering:
        age = sum(ages.values()) / len(ages)
        values |= {"clients/age": age, "clients/too_old": float(opened.too_old)}
    user_log().log(values)


def sent_round(task: RoundTask) -> SentRound:
    """The round for clients."""
    content = packed(task.tensors)
    return SentRound(content, digest(content), list(task.rates))
