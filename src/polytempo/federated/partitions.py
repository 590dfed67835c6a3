"""Partitions: which samples of a data set each client has. Each is a function of the labels, a number and a seed.

iid(100)                  equal parts, drawn at random
dirichlet(100, 0.5)       each class is spread over the clients by a draw from Dirichlet(α): small α, few classes each
shards(100, per_client=2) sorted by label, cut into equal pieces, and so many pieces for each client
by_size(100, sigma=1)     drawn at random, sizes as exp(σ z): few clients with many samples
by(keys)                  a client for each key, such as a speaker or a writer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["by", "by_size", "dirichlet", "iid", "shards"]

Partition = Callable[[Tensor, int], list[Tensor]]
"""partition(labels, seed): the samples' numbers of each client. Labels have the shape (samples,) or (samples, …)."""


def iid(clients: int) -> Partition:
    """Equal parts of the samples in a random order; sizes differ by at most one."""
    _check(clients=clients)

    def parts(labels: Tensor, seed: int) -> list[Tensor]:
        return _cut(_generator(seed, "iid").permutation(len(labels)), clients)

    return _named(parts, f"iid({clients})")


def dirichlet(clients: int, alpha: float = 0.5, least: int = 1) -> Partition:
    """Spread each class over the clients by proportions p ~ Dirichlet(α, …, α); every client has `least` samples.

    Draws are repeated until each client has that many. Source: T.-M. H. Hsu, H. Qi and M. Brown, "Measuring the effects
    of non-identical data distribution for federated visual classification", 2019; by class as in Q. Li, Y. Diao, Q.
    Chen and B. He, "Federated learning on non-IID data silos", 2022.
    """
    _check(clients=clients, alpha=alpha, least=least)

    def parts(labels: Tensor, seed: int) -> list[Tensor]:
        random, classes = _generator(seed, "dirichlet"), _classes(labels)
        if least * clients > len(labels):
            raise ValueError(
                f"dirichlet({clients}, least={least}): {len(labels)} samples are too few; use fewer clients"
            )
        for _ in range(_MOST_DRAWS):
            found: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
            for number in np.unique(classes):
                own = random.permutation(np.flatnonzero(classes == number))
                ends = (np.cumsum(random.dirichlet([alpha] * clients)) * len(own)).round().astype(int)[:-1]
                for client, part in enumerate(np.split(own, ends)):
                    found[client].append(part)
            joined = [np.concatenate(each) for each in found]
            if min(map(len, joined)) >= least:
                return [torch.from_numpy(random.permutation(each)) for each in joined]
        raise ValueError(
            f"dirichlet({clients}, alpha={alpha:g}): {_MOST_DRAWS} draws left a client with fewer than {least} "
            "samples; use a larger alpha, fewer clients, or least=1"
        )

    return _named(parts, f"dirichlet({clients}, alpha={alpha:g})")


def shards(clients: int, per_client: int = 2) -> Partition:
    """Sort samples by label, cut them into clients · per_client equal pieces, and deal each client so many of them.

    Most clients have samples of `per_client` classes. Source: B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera
    y Arcas, "Communication-efficient learning of deep networks from decentralized data", 2017, section 3.
    """
    _check(clients=clients, per_client=per_client)

    def parts(labels: Tensor, seed: int) -> list[Tensor]:
        random, classes = _generator(seed, "shards"), _classes(labels)
        if clients * per_client > len(classes):
            raise ValueError(
                f"shards({clients}, per_client={per_client}): {len(classes)} samples are fewer than the pieces; use "
                "fewer clients"
            )
        mixed = random.permutation(len(classes))
        pieces = _cut(mixed[np.argsort(classes[mixed], kind="stable")], clients * per_client)
        dealt = random.permutation(len(pieces)).reshape(clients, per_client)
        return [torch.cat([pieces[piece] for piece in own]) for own in dealt]

    return _named(parts, f"shards({clients}, per_client={per_client})")


def by_size(clients: int, sigma: float = 1.0) -> Partition:
    """Random parts of unequal size: nₖ ∝ exp(σ zₖ), zₖ normal; each client has a sample."""
    _check(clients=clients)

    def parts(labels: Tensor, seed: int) -> list[Tensor]:
        random, spare = _generator(seed, "by_size"), len(labels) - clients
        if spare < 0:
            raise ValueError(f"by_size({clients}): {len(labels)} samples are too few; use fewer clients")
        weights = np.exp(sigma * random.standard_normal(clients))
        ends = (np.cumsum(weights / weights.sum()) * spare).round().astype(int) + np.arange(1, clients + 1)
        order = random.permutation(len(labels))
        return [torch.from_numpy(each) for each in np.split(order, ends[:-1])]

    return _named(parts, f"by_size({clients}, sigma={sigma:g})")


def by(keys: Sequence[object]) -> Partition:
    """A client for each different key, in sorted order; `keys` has one for each sample."""
    given = list(keys)

    def parts(labels: Tensor, seed: int) -> list[Tensor]:
        if len(given) != len(labels):
            raise ValueError(f"by(keys) has {len(given)} keys for {len(labels)} samples; give one for each")
        found: dict[object, list[int]] = {}
        for number, key in enumerate(given):
            found.setdefault(key, []).append(number)
        return [torch.tensor(found[key]) for key in sorted(found, key=str)]

    return _named(parts, "by(keys)")


_MOST_DRAWS = 1000


def _named(parts: Partition, name: str) -> Partition:
    parts.__name__ = name
    return parts


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be above 0, got {number}")


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose.encode()])


def _classes(labels: Tensor) -> NDArray[np.int64]:
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"this partition sorts samples by class, and the targets have shape {tuple(labels.shape)} and dtype "
            f"{labels.dtype}; use iid, by_size or by(keys)"
        )
    return labels.numpy().astype(np.int64)


def _cut(order: NDArray[np.int64], pieces: int) -> list[Tensor]:
    if pieces > len(order):
        raise ValueError(f"{len(order)} samples cannot be dealt to {pieces} clients; use fewer clients")
    return [torch.from_numpy(each) for each in np.array_split(order, pieces)]
