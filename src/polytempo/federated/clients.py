"""`Clients`: a data set with the samples of each client, and `Cohorts`: the clients that train in each round.

clients    0     1     2     3     4     5     6          each with samples of its own
round 0          ●           ●           ●                a cohort: drawn from (seed, round), all different
round 1    ●     ●                             ●
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from polytempo.core.strategy import Buffering
from polytempo.core.system.url_path import place
from polytempo.federated.arrivals import Arrivals
from polytempo.federated.client_tests import ClientTests
from polytempo.federated.partitions import Partition
from polytempo.federated.privacy import Releases
from polytempo.federated.sampling import Sampling, generator, independent


class PartitionFacts(NamedTuple):
    """A partition in numbers."""

    clients: int
    samples: int
    sizes: tuple[int, int, int]
    """Samples of the smallest, the median and the largest client."""
    entropy: float | None
    """The mean over clients of the entropy of their classes, in bits. None: the targets name no class."""
    distance: float | None
    """The mean over clients, by samples, of half the L1 distance of their classes from all clients' classes: 0 to 1."""


@final
class Clients(Dataset[Any]):
    """A data set and the numbers of each client's samples; as a data set it is the whole one, without `test`."""

    def __init__(
        self,
        dataset: Dataset[Any],
        parts: Sequence[Tensor],
        sampling: Sampling | None = None,
        test: ClientTests | None = None,
    ) -> None:
        """ValueError for a client without samples, and for a sample of two clients."""
        length = len(dataset)  # type: ignore[arg-type]
        used = torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.long)
        if not len(used) or any(not len(part) for part in parts):
            raise ValueError("a client without samples cannot train; leave it out, or use fewer clients")
        if len(used.unique()) != len(used) or int(used.max()) >= length:
            raise ValueError(f"parts of clients must name different samples of 0 to {length - 1}")
        self.dataset, self.parts, self.sampling = dataset, list(parts), sampling or Sampling()
        self._trained = None if test is None else used.sort().values
        self.test = test
        """Test samples of each client, as one data set for `pt.Data`; None: none were held out."""

    def __len__(self) -> int:
        return len(self.dataset) if self._trained is None else len(self._trained)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number if self._trained is None else int(self._trained[number])]

    @property
    def sizes(self) -> list[int]:
        """Samples of each client."""
        return [len(part) for part in self.parts]

    def counts(self) -> Tensor:
        """Samples of each class of each client, shape (clients, classes)."""
        labels = labels_of(self.dataset)
        if labels.dim() != 1 or labels.is_floating_point():
            raise ValueError("the targets of these data name no class, so clients cannot be counted by class")
        classes = int(labels.max()) + 1
        return torch.stack([torch.bincount(labels[part], minlength=classes) for part in self.parts])

    def facts(self) -> PartitionFacts:
        """The partition in numbers."""
        sizes = sorted(self.sizes)
        entropy = distance = None
        labels = labels_of(self.dataset)
        if labels.dim() == 1 and not labels.is_floating_point():
            counts = self.counts()
            each_entropy, each_distance = _mixtures(counts)
            entropy = float(each_entropy.mean())
            distance = float((each_distance * counts.sum(1)).sum() / counts.sum())
        return PartitionFacts(len(sizes), sum(sizes), (sizes[0], sizes[len(sizes) // 2], sizes[-1]), entropy, distance)

    def plot(self, path: str) -> None:
        """Write a PNG with a row for each client: its classes, samples, entropy and distance from all clients' classes.

        ValueError for targets that name no class.
        """
        counts, facts = self.counts(), self.facts()
        entropy, distance = _mixtures(counts)
        least, median, most = facts.sizes
        title = (
            f"{facts.samples:,} samples of {facts.clients:,} clients: {least:,} to {most:,} each, median {median:,}; "
            f"entropy {facts.entropy:.2f} bits, distance {facts.distance:.2f}"
        )
        picture = import_module("polytempo.report.pictures.clients_picture")
        picture.draw_clients(place(path), counts.numpy(), entropy.numpy(), distance.numpy(), title)


def _mixtures(counts: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy of each client's classes, in bits, and half the L1 distance from all clients' classes."""
    found = counts.double()
    own, whole = found / found.sum(1, keepdim=True), found.sum(0) / found.sum()
    return -(own * own.clamp(min=1e-300).log2()).sum(1), (own - whole).abs().sum(1) / 2


def clients(
    dataset: Dataset[Any],
    partition: Partition,
    seed: int = 0,
    sampling: Sampling | None = None,
    test: float | None = None,
) -> Clients:
    """The samples of `dataset` dealt to clients by `partition`; the same for the same seed.

        train, test = pt.data.mnist(path)
        pt.Data(pt.federated.clients(train, pt.federated.shards(100, per_client=2)), test)

    A job with such training data needs no option `clients`. `sampling` says who can take part in a round, such as
    `pt.federated.day_and_night()` (None: all clients).

    `test`: the part of each client's samples that is held out, drawn from the seed; a client keeps one sample at least.
    They are `clients(…).test`, a test set for `pt.Data`. Scores then have the spread of clients' accuracies
    (`clients/median`, `clients/p10`, …) and `clients/took_part`, the clients that have taken part so far:

        dealt = pt.federated.clients(train, pt.federated.dirichlet(100, alpha=0.5), test=0.2)
        pt.Data(dealt, dealt.test)
    """
    parts = partition(labels_of(dataset), seed)
    if test is None:
        return Clients(dataset, parts, sampling)
    if not 0 < test < 1:
        raise ValueError(f"test={test}: a part of each client's samples is above 0 and below 1")
    halves = [held_out(part, test, seed, number) for number, part in enumerate(parts)]
    kept, tests = [each[0] for each in halves], [each[1] for each in halves]
    return Clients(dataset, kept, sampling, ClientTests(dataset, tests))


def held_out(part: Tensor, test: float, seed: int, number: int) -> tuple[Tensor, Tensor]:
    """A client's samples without its test samples, which are a fraction `test` of them, and these."""
    order = torch.from_numpy(generator(seed, "tests of clients", number).permutation(len(part)))
    count = min(len(part) - 1, round(test * len(part)))
    return part[order[count:].sort().values], part[order[:count].sort().values]


def labels_of(dataset: Dataset[Any]) -> Tensor:
    """The targets of a data set of pairs: the last tensor of a `TensorDataset`, else the second part of each sample."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    length = len(dataset)  # type: ignore[arg-type]
    return torch.stack([torch.as_tensor(dataset[number][1]) for number in range(length)])


class Client(NamedTuple):
    """A client in a round."""

    number: int
    dataset: Dataset[Any]
    part: Tensor
    """The numbers of its samples."""
    collate: Callable[[list[Any]], Any] | None
    weight: float = 1.0
    """The client's part of all samples."""
    age: int = 0
    """Updates of the server since the model that the client begins with."""

    def __len__(self) -> int:
        return len(self.part)

    def batches(self, batch_size: int | None, order: Tensor) -> Iterator[Any]:
        """Batches of at most so many of its samples, in `order`, a permutation of 0 to len - 1."""
        if not len(self):
            return
        for chosen in self.part[order].split(batch_size or len(order)):
            if isinstance(self.dataset, TensorDataset) and self.collate is None:
                yield [tensor.index_select(0, chosen) for tensor in self.dataset.tensors]
            else:
                samples = [self.dataset[number] for number in chosen.tolist()]
                yield (self.collate or default_collate)(samples)


@final
class Cohorts(Dataset[Client]):
    """The clients of rounds as `DataShard` deals them: `order(round)` draws a cohort, and an item is a client."""

    def __init__(
        self,
        clients: Clients,
        size: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        buffering: Buffering | None = None,
        expected: int | None = None,
    ) -> None:
        """`size`: clients in a round; with `expected`, at most so many, and the expected number.

        ValueError where there are not so many.
        """
        least = size if expected is None else expected
        if least > len(clients.parts):
            raise ValueError(
                f"a round of {least} clients needs that many, and there are {len(clients.parts)}; give a smaller cohort"
            )
        self.clients, self._size, self._seed, self._collate = clients, size, seed, collate
        self._samples = sum(clients.sizes)
        if buffering is not None and clients.sampling != Sampling():
            raise ValueError(
                "an asynchronous server draws its clients itself; leave out sampling= of the run or the data, or use "
                "fed_avg()"
            )
        self._arrivals = (
            None if buffering is None else Arrivals(clients.sizes, size, *buffering[:3], seed, buffering.lost)
        )
        if expected is not None and clients.sampling != Sampling():
            raise ValueError(
                "clients of private rounds take part with equal probabilities; leave out sampling= of the run or the "
                "data"
            )
        self._took_part: set[int] = set()
        self._known_rounds = 0
        self._turns: Counter[int] = Counter()
        self._counted_rounds = 0
        self._likely = None if expected is None else expected / len(clients.parts)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Client:
        if self._arrivals is None and number >= len(self.clients.parts):
            return Client(number, self.clients.dataset, torch.empty(0, dtype=torch.long), self._collate, weight=0.0)
        age, client = divmod(number, len(self.clients.parts))
        part = self.clients.parts[client]
        return Client(client, self.clients.dataset, part, self._collate, len(part) / self._samples, age)

    def counted(self, client: Client) -> int:
        """The samples that a client weighs by in its round."""
        return min(1, len(client)) if self.clients.sampling.by_samples else len(client)

    def ages(self, round_number: int) -> dict[int, int]:
        """The clients of a round, and the ages of the models that they begin with. Cost: a draw."""
        drawn = (self[each] for each in self.order(round_number).tolist())
        return {client.number: client.age for client in drawn if len(client)}

    def took_part(self, rounds: int) -> int:
        """The number of clients in the first `rounds` rounds. Cost: a draw for each round that was not asked before."""
        if rounds < self._known_rounds:
            self._took_part, self._known_rounds = set(), 0
        for number in range(self._known_rounds, rounds):
            drawn = (self[each] for each in self.order(number).tolist())
            self._took_part |= {client.number for client in drawn if len(client)}
        self._known_rounds = rounds
        return len(self._took_part)

    def most_turns(self, rounds: int) -> int:
        """The rounds, of the first `rounds`, of the client that took part most often. Cost: as of `took_part`."""
        if rounds < self._counted_rounds:
            self._turns, self._counted_rounds = Counter(), 0
        for number in range(self._counted_rounds, rounds):
            drawn = (self[each] for each in self.order(number).tolist())
            self._turns.update(client.number for client in drawn if len(client))
        self._counted_rounds = rounds
        return max(self._turns.values(), default=0)

    def releases(self, rounds: int) -> Releases:
        """Noisy sums of the first `rounds` rounds."""
        return Releases(len(self.clients.parts), rounds)

    def order(self, round_number: int) -> Tensor:
        """The cohort of a round, shape (size,): drawn from (seed, round) alone, without repetition.

        A number is the client's, plus the number of clients times its model's age. With `expected` each client takes
        part with the same probability, independently (Poisson sampling), and places that stay free have numbers above
        the last client's.
        """
        if self._arrivals is not None:
            found = self._arrivals.buffer(round_number)
            return torch.tensor([each.client + len(self.clients.parts) * each.age for each in found])
        if self._likely is not None:
            number = len(self.clients.parts)
            taken = independent(number, self._likely, self._size, self._seed, round_number)
            return torch.from_numpy(np.concatenate([taken, number + np.arange(self._size - len(taken))]))
        drawn = self.clients.sampling.drawn(self.clients.sizes, self._size, self._seed, round_number)
        return torch.from_numpy(drawn)


def only(clients: list[Client]) -> Client:
    """The one client of a list."""
    [client] = clients
    return client
