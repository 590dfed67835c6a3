"""`private`: a strategy of rounds with differential privacy of its clients, and ε, which it spends."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polytempo.aggregation import mean
from polytempo.collectives.invariant import Invariant
from polytempo.core import Strategy, call_name
from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import InRounds, LocalTraining, Privacy
from polytempo.federated.rounds import by_samples

__all__ = ["private"]

_OVERFLOW = 1e-15
"""Probability of a round with more clients than it has places for."""


def private(inner: Strategy, clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5) -> Strategy:
    """Clip each client's movement and add Gaussian noise to their mean, so that a model tells little of any client.

        pt.run(job, pt.federated.private(pt.federated.fed_avg(cohort=100), clip=0.5), clients="iid(10000)", workers=2)

    With m the strategy's `cohort`, K clients, S = `clip` and z = `noise`:

        cohort ← each client, with probability m / K        Δₖ ← Δₖ min(1, S / ‖Δₖ‖), before its code and behind it
        gradient ← 1/m (Σₖ Δₖ + N(0, z² S² I)), then the step of `inner`

    Clients count equally, with many samples or few, and the divisor is fixed. A round has places for more
    clients than m, so that it has too few of them with probability 1e-15.

    Rows of tests and the result's `metrics` have `epsilon` and `delta` after all rounds so far, those before a resume
    included: the model is (ε, δ)-private for adding or removing one client with all of its samples. Noise 0 clips only,
    and there is no ε. The extra `privacy` brings the accountant (Rényi divergences, by dp-accounting).

    The guarantee is of models. Rows of training have the clients' losses without noise. Noise and cohorts are drawn
    from the run's seed, so it must stay a secret; with clients on machines of their own (`serve`) the server makes a
    secret of its own. The rounding of floats is not counted.

    Cost: a pass over each movement, and a draw of noise for the model in each round.

    Errors: ValueError for a strategy that sends more than movements, or weighs them by the clients' values, such as
    `fed_nova`. `Incompatible` (PT2513) without the accountant.

    Source: B. McMahan, D. Ramage, K. Talwar and L. Zhang, "Learning differentially private recurrent language models",
    2018, algorithm 1, with equal weights, flat clipping and the fixed denominator q W.
    """
    rounds = inner.rounds
    if not (clip > 0 and noise >= 0 and 0 < delta < 1):
        raise ValueError(
            f"clip must be above 0, noise at least 0, delta between 0 and 1; got {clip}, {noise} and {delta}"
        )
    if rounds is None or rounds != InRounds(rounds.number, _plain(rounds.local), by_samples, rounds.server):
        raise ValueError(
            f"private takes rounds of clients that send movements alone, weighed by their samples, and {inner} does "
            "not; give fed_avg, fed_avg_m, fed_prox, fed_adam, fed_yogi or fed_adagrad"
        )
    if inner.sample_privacy is not None:
        reason = "private counts clients, and dp_sgd samples: a run has one ε"
        refuse({"private samples", "other strategy"}, strategy=inner, reason=reason)
    cohort = rounds.number
    places = _most_drawn(cohort) + 1

    def shares(samples: Tensor, local: LocalTraining) -> Tensor:
        return (samples > 0) / torch.tensor(cohort, dtype=samples.dtype)

    meeting = replace(
        rounds, number=places, shares=shares, privacy=Privacy(float(clip), float(noise), float(delta), cohort)
    )
    return replace(inner, name=call_name(private, locals()), gradients=mean(Invariant(places)), meeting=meeting)


def _most_drawn(mean_number: float) -> int:
    """The least k with P(X > k) of at most `_OVERFLOW`, where X has Poisson's distribution. (scipy's takes seconds to
    import.)"""
    k, tail = int(mean_number + 12 * math.sqrt(mean_number)) + 40, 0.0
    while tail <= _OVERFLOW:  # P(X > k)
        tail += math.exp(k * math.log(mean_number) - mean_number - math.lgamma(k + 1))
        k -= 1
    return k + 1


def _plain(local: LocalTraining) -> LocalTraining:
    return LocalTraining(local.epochs, local.batch_size, local.proximal)


class Releases(NamedTuple):
    """Noisy sums of clients' movements. Each round draws every client with the same probability."""

    clients: int
    """Clients that may be drawn."""
    rounds: int
    """Rounds with a noisy sum."""
    repeated: tuple[tuple[int, int], ...] = ()
    """(k, rounds that have k noisy sums of the same draw), for k of at least 2."""


def clip_(movement: list[Tensor], norm: float) -> None:
    """Scale the movement so that its norm over all tensors is at most `norm`."""
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(movement)))
    torch._foreach_mul_(movement, (norm / length).clamp(max=1.0))


def noise_source(seed: int, *place: object) -> np.random.Generator:
    """The source of the noise at a place of a run: a client, a round, a step.

    Its key has 128 bits. Of a seed torch's generator on the CPU takes 32, which could all be tried.
    """
    key = hashlib.sha256(",".join(map(str, ("polytempo", "noise", seed, *place))).encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def gaussian_like(tensor: Tensor, source: np.random.Generator) -> Tensor:
    """Numbers of N(0, 1), as many as in `tensor`, and where it is."""
    drawn = source.standard_normal(tensor.numel(), np.float64 if tensor.dtype == torch.float64 else np.float32)
    return torch.from_numpy(drawn).view(tensor.shape).to(tensor.device, tensor.dtype)


def add_noise_(mean_part: list[Tensor], privacy: Privacy, source: np.random.Generator) -> None:
    """Add N(0, (z S / m)²) to each number."""
    for tensor in mean_part:
        tensor.add_(gaussian_like(tensor, source), alpha=privacy.noise * privacy.clip / privacy.cohort)


@lru_cache(maxsize=64)
def epsilon(privacy: Privacy, clients: int, rounds: int, repeated: tuple[tuple[int, int], ...] = ()) -> float:
    """ε at the privacy's δ after so many rounds, as of `Releases`. Cost: half a second, once for each number of rounds.

    k noisy sums of one draw tell as much as one with the noise z / √k.

    Source: I. Mironov, K. Talwar and L. Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019, by
    dp-accounting.
    """
    if not rounds:
        return 0.0
    accounting: Any = import_module("dp_accounting")
    accountant = import_module("dp_accounting.rdp").RdpAccountant()
    once = rounds - sum(number for _, number in repeated)
    for sums, number in ((1, once), *repeated):
        noisy = accounting.GaussianDpEvent(privacy.noise / sums**0.5)
        if number:
            accountant.compose(accounting.PoissonSampledDpEvent(privacy.cohort / clients, noisy), number)
    return float(accountant.get_epsilon(privacy.delta))
