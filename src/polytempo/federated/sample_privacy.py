"""`dp_sgd`: a strategy with differential privacy of samples, and ε, which it spends."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from polytempo.aggregation import mean
from polytempo.core import Strategy, call_name
from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import ByMessages, SamplePrivacy, any_optimizer

__all__ = ["dp_sgd"]

_PLAIN_MEANS = "sync_sgd("


def dp_sgd(inner: Strategy | None = None, clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5) -> Strategy:
    """Clip the gradient of each sample and add Gaussian noise to their sum, so that a model tells little of any sample.

        pt.run("digits", pt.federated.dp_sgd(clip=0.5, noise=2.0), workers=2, epochs=10)
        pt.run("digits", pt.federated.dp_sgd(pt.federated.fed_avg(cohort=6)), workers=2, clients="iid(30)", steps=20)

    With S = `clip`, z = `noise` and a step's B samples:

        gᵢ ← gᵢ min(1, S / ‖gᵢ‖)        g ← 1/B (Σᵢ gᵢ + N(0, z² S² I)), then the optimizer's step

    `inner` is `sync_sgd` (None), with B the global batch: each worker adds its share of the noise. Or it has rounds of
    clients (`fed_avg`, …), with B a batch of the client, which adds all of the noise: the movement that it sends tells
    little of its samples, too. `secure`, `fed_robust` and `fed_coded` go inside. `torch.func` has the gradients.

    Rows of tests and the result's `metrics` have `epsilon` and `delta` of the whole run, resumes included: the models
    are (ε, δ)-private for leaving out the contributions of a sample. An epoch has each sample once, dealt and not
    drawn. So ε counts a Gaussian mechanism for each pass over a sample, and sampling lowers it by nothing. Of clients
    it is of the client that has trained most. Noise 0 clips only, and there is no ε. The extra `privacy` brings the
    accountant.

    Rows of training have losses without noise. Noise is drawn from the run's seed, so it must stay a secret; clients on
    machines of their own (`serve`) make secrets of their own, and ε counts all orders to them. Scores of samples, and
    the rounding of floats, are not counted.

    Cost: a gradient for each sample, in chunks of 256 MiB, and a draw of noise for the model in each step.

    Errors: `Incompatible` (PT2521) for other strategies, PT2522 for models with batch norm, PT2523 to PT2532 for
    loops and options that need gradients of batches, PT2513 without the accountant.

    Source: M. Abadi et al., "Deep learning with differential privacy", 2016, Algorithm 1. Deviation: batches without
    sampling, as in L. Chua et al., "How private are DP-SGD implementations?", 2024 (deterministic batches).
    """
    if inner is None:
        inner = Strategy(f"{_PLAIN_MEANS}route=native)", gradients=mean())
    if not (clip > 0 and noise >= 0 and 0 < delta < 1) or (noise and clip == math.inf):
        raise ValueError(
            "clip must be above 0, and finite with noise, noise at least 0, delta between 0 and 1; got "
            f"{clip}, {noise} and {delta}"
        )
    if (reason := _other(inner)) is not None:
        refuse({"private samples", "other strategy"}, strategy=inner, reason=reason)
    name = call_name(dp_sgd, {"inner": inner, "clip": clip, "noise": noise, "delta": delta})
    return replace(inner, name=name, sample_privacy=SamplePrivacy(float(clip), float(noise), float(delta)))


def _other(inner: Strategy) -> str | None:
    """The reason why a strategy cannot have private samples; None: it can."""
    rounds = inner.rounds
    if inner.sample_privacy is not None:
        return "it has private samples already"
    if rounds is None:
        plain = inner.name.startswith(_PLAIN_MEANS) and isinstance(inner.meeting, ByMessages)
        return (
            None if plain and inner.fit is any_optimizer else "its workers use gradients before their sum has its noise"
        )
    if rounds.privacy is not None:
        return "it is private by clients, which have all of their samples"
    return "it weighs clients by losses without noise" if rounds.local.fairness else None


@lru_cache(maxsize=64)
def sample_epsilon(privacy: SamplePrivacy, passes: int) -> float:
    """ε at the privacy's δ after so many passes over a sample: 1 Gaussian mechanism each, without sampling.

    Cost: milliseconds, once for each number. Source: as `privacy.epsilon`.
    """
    if not passes:
        return 0.0
    accounting: Any = import_module("dp_accounting")
    accountant = import_module("dp_accounting.rdp").RdpAccountant()
    accountant.compose(accounting.GaussianDpEvent(privacy.noise), passes)
    return float(accountant.get_epsilon(privacy.delta))
