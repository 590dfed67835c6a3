"""Rounds of clients elsewhere, as a run's data: places that clients take when a round begins.

a job's data   RemoteData ──▶ RemotePlaces: place 0, 1, …      a round's clients are known when it begins
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polytempo.core import Codec
from polytempo.core.strategy import SecureSum
from polytempo.federated.clients import Client
from polytempo.federated.privacy import Releases
from polytempo.federated.secure_sum import Words
from polytempo.spec.job import Data
from polytempo.training.federated.noise_record import NoiseRecord

NO_ROUND = -1
"""The number of no round: the server has taken no movement of a client yet."""


class ClientAnswer(NamedTuple):
    """A client's part of a round, as it was checked."""

    client: int
    samples: int
    loss: float
    """The mean over its local steps."""
    movement: dict[str, Tensor]
    """θ - θₖ by name; parameters that had no gradient are left out."""
    right: float = 0.0
    """Right predictions of the round's model on the client's own test samples."""
    tested: float = 0.0
    first_loss: float = 0.0
    """The loss of the round's model on its samples, where the strategy weighs by it."""
    age: int = 0
    """Rounds of the server since the model that the client began with."""


class SumTask(NamedTuple):
    """The secure sum of a round."""

    secure: SecureSum
    numel: int
    """Numbers of a movement."""
    shares: Callable[[Sequence[ClientAnswer]], list[float]]
    """The weights of clients that have answered."""


class RoundAnswers(NamedTuple):
    """A round as clients have performed it."""

    answers: list[ClientAnswer]
    """Answers by draw or by arrival. Of a secure sum: the clients with their movement in it."""
    words: Words | None = None
    """A secure sum."""
    scale: float = 1.0
    """A client's weight in the sum, by its weight among `answers`: below 1 where clients were lost between."""


class RoundTask(NamedTuple):
    """A round for clients of other processes."""

    number: int
    tensors: Mapping[str, Tensor]
    """The model as it travels, and the server's control variate, by name."""
    rates: Sequence[float]
    """Learning rates of the clients' parameter groups."""
    expected: Mapping[str, Tensor]
    """Tensors of a movement's names, shapes and dtypes."""
    codec: Codec | None = None
    """The code of a movement's parameters."""
    taken: Mapping[int, int] = {}
    """The last round that has a client's movement, by its number."""
    problem: Callable[[ClientAnswer], str | None] = lambda answer: None
    """The reason to refuse an answer with finite tensors of the right shapes; None: it is right."""
    drawn: Sequence[int] | None = None
    """The round's clients, as far as they are there. None: the server draws among clients that are there."""
    training: Mapping[int, int] = {}
    """Clients in training when the run was saved, and the rounds that they began in."""
    earlier: Callable[[int], RoundTask] | None = None
    """An earlier round, for clients in training."""
    asked: Callable[[Sequence[int]], None] = lambda clients: None
    """Counts clients that are asked next, and may train."""
    sum: SumTask | None = None
    """Clients send their movements under masks."""


class RemoteRounds(Protocol):
    """Performs rounds with clients of other processes."""

    @property
    def samples(self) -> Mapping[int, int]:
        """The samples of each client that has come, by its number."""

    @property
    def training(self) -> Mapping[int, int]:
        """Clients that train while no round goes on, and the rounds that they began in."""

    def performed(self, task: RoundTask) -> RoundAnswers:
        """Let a cohort train. Without an answer the round passes by, but where `task` names the round's clients."""


@final
class RemotePlaces(Dataset[Client]):
    """The places of a round, as `DataShard` deals them."""

    def __init__(self, places: int, noise: NoiseRecord) -> None:
        self._places, self._noise = places, noise

    def __len__(self) -> int:
        return self._places

    def __getitem__(self, number: int) -> Client:
        return Client(number, self, torch.zeros(1, dtype=torch.long), None)

    def order(self, round_number: int) -> Tensor:
        """All places."""
        return torch.arange(self._places)

    def counted(self, client: Client) -> int:
        """1: the weights of clients are known at the end of the round."""
        return 1

    def most_turns(self, rounds: int) -> int:
        """Turns of the client with most, lost rounds included."""
        return self._noise.most_turns(rounds)

    def releases(self, rounds: int) -> Releases:
        """Noisy sums of the first `rounds` rounds, and of rounds that a server lost before it was resumed."""
        return self._noise.releases(rounds)


@dataclass(frozen=True)
class RemoteData:
    """The `data` of a server's job."""

    places: int
    rounds: RemoteRounds
    clients: int
    """Clients that may come."""
    noise: NoiseRecord
    """The secret of noise and draws."""
    test: Dataset[Any] | None = None

    def __call__(self, path: str | Path | None) -> Data:
        """Places to train at, and the server's own test set."""
        return Data(RemotePlaces(self.places, self.noise), self.test)
