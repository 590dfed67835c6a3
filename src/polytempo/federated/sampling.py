"""Sampling of a round's clients: clients that are there, and the first to answer.

day_and_night(24, 0.4)   a client is there in two fifths of each day of 24 rounds, at hours of its own
drop_outs(0.1)           a client is away in a tenth of the rounds, drawn for each round
over_selected(0.3)       the server asks 1.3 times as many clients, and takes the first to answer
weighted()               a client with twice the samples is drawn twice as often, and counts as much as any other
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["both", "day_and_night", "drop_outs", "over_selected", "weighted"]

Presence = Callable[[int, int, int], NDArray[np.bool_]]
"""presence(clients, round, seed): who is there, shape (clients,)."""
_MOST_WAITS = 1000


class Sampling(NamedTuple):
    """The rule that draws a round's clients. Without presences all are there, and without `extra` all asked answer."""

    presences: tuple[Presence, ...] = ()
    extra: float = 0.0
    sigma: float = 1.0
    by_samples: bool = False
    """True: clients are drawn by their samples, and a round's clients count alike."""

    def drawn(self, sizes: Sequence[int], cohort: int, seed: int, round_number: int) -> NDArray[np.int64]:
        """The clients of a round, all different, shape (cohort,): a pure function of its arguments.

        Where too few are there, the server waits round by round until there are enough. ValueError after 1,000 waits.
        """
        return self._round(sizes, cohort, seed, round_number)[0]

    def duration(self, sizes: Sequence[int], cohort: int, seed: int, round_number: int) -> float:
        """The time from a round's begin to its last answer that counts, in units of a sample's training on the median
        client, as `Arrivals` has them for an asynchronous server. Waits for clients that are away are not in it."""
        return self._round(sizes, cohort, seed, round_number)[1]

    def _round(self, sizes: Sequence[int], cohort: int, seed: int, number: int) -> tuple[NDArray[np.int64], float]:
        random, asked = generator(seed, "cohort", number), -int(-cohort * (1 + self.extra) // 1)
        likely = np.asarray(sizes, dtype=np.float64) if self.by_samples else None
        for moment in range(number, number + _MOST_WAITS):
            there = np.ones(len(sizes), dtype=bool)
            for presence in self.presences:
                there &= presence(len(sizes), moment, seed)
            if there.sum() >= cohort:
                present = np.flatnonzero(there)
                odds = None if likely is None else likely[present] / likely[present].sum()
                chosen = random.choice(present, min(asked, len(present)), replace=False, p=odds)
                seconds = durations(sizes, self.sigma, seed)[chosen]
                seconds = seconds * np.exp(self.sigma * random.standard_normal(len(chosen)))
                first = np.sort(np.argsort(seconds, kind="stable")[:cohort])
                return chosen[first], float(seconds[first].max())
        raise ValueError(
            f"in {_MOST_WAITS} rounds from round {number} there were never {cohort} clients at a time; use a "
            "smaller cohort, or clients that are there more often"
        )


def day_and_night(day: int = 24, awake: float = 0.5) -> Sampling:
    """Clients that are there for the part `awake` of each day of `day` rounds; hours are a client's own, drawn once.

    Source: H. Eichner, T. Koren, H. B. McMahan, N. Srebro and K. Talwar, "Semi-cyclic stochastic gradient descent",
    2019, for the effect; hours here are spread evenly.
    """
    if day < 1 or not 0 < awake <= 1:
        raise ValueError(f"a day has rounds and a part of it awake, above 0 to 1; got day={day}, awake={awake}")

    def presence(clients: int, round_number: int, seed: int) -> NDArray[np.bool_]:
        begins = generator(seed, "hours").random(clients)
        return (round_number / day + begins) % 1 < awake

    return Sampling((presence,))


def drop_outs(rate: float = 0.1) -> Sampling:
    """Clients that are away with probability `rate`, drawn for each client and round."""
    if not 0 <= rate < 1:
        raise ValueError(f"rate is a probability from 0 to below 1, got {rate}")

    def presence(clients: int, round_number: int, seed: int) -> NDArray[np.bool_]:
        return generator(seed, "drop-outs", round_number).random(clients) >= rate

    return Sampling((presence,))


def over_selected(extra: float = 0.3, sigma: float = 1.0) -> Sampling:
    """The server asks ⌈cohort · (1 + extra)⌉ clients, and a round has the first to answer; others have worked in vain.

    A client's time is its samples times exp(σ zₖ) exp(σ z), with zₖ drawn once and z for the round. So slow clients,
    and large ones, take part less often.

    Source: K. Bonawitz et al., "Towards federated learning at scale: System design", 2019, which asks 130 % of the
    clients.
    """
    if not extra >= 0 or not sigma >= 0:
        raise ValueError(f"extra and sigma must be at least 0, got {extra} and {sigma}")
    return Sampling((), extra, sigma)


def weighted() -> Sampling:
    """Clients are drawn one after the other, without repetition, each by its samples.

    The clients of a round then count alike, where `fed_avg` would weigh them by their samples: large clients take part
    more often instead. With few clients of many in a round the mean over rounds is nearly the one of `fed_avg` with all
    clients; equal sizes make it the plain draw's.

    Source: X. Li, K. Huang, W. Yang, S. Wang and Z. Zhang, "On the convergence of FedAvg on non-IID data", 2020,
    scheme I, which draws with repetition.
    """
    return Sampling(by_samples=True)


def both(first: Sampling, second: Sampling) -> Sampling:
    """Clients by both rules: they are there by both; the one with `extra` says who is first, and either weighs."""
    slower = first if first.extra else second
    by_samples = first.by_samples or second.by_samples
    return Sampling((*first.presences, *second.presences), slower.extra, slower.sigma, by_samples)


def independent(clients: int, probability: float, most: int, seed: int, round_number: int) -> NDArray[np.int64]:
    """Clients that each take part with `probability`, independently of others (Poisson sampling), in a random order.

    At most `most` of them.
    """
    random = generator(seed, "cohort", round_number)
    return random.permutation(np.flatnonzero(random.random(clients) < probability))[:most]


def durations(sizes: Sequence[int], sigma: float, seed: int) -> NDArray[np.float64]:
    """nₖ exp(σ zₖ): the time of each client's training, in units of a sample's on the median client."""
    speeds: NDArray[np.float64] = np.exp(sigma * generator(seed, "speeds").standard_normal(len(sizes)))
    return np.asarray(sizes, dtype=np.float64) * speeds


def generator(seed: int, purpose: str, number: int | None = None) -> np.random.Generator:
    """Random numbers of a run's seed for a purpose, and a round."""
    key = f"polytempo,{purpose},{seed}" + ("" if number is None else f",{number}")
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
