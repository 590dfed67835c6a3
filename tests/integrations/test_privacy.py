"""ε of `private` by the real accountant, against published and closed figures."""

from __future__ import annotations

import math

import pytest
import torch

import polytempo as pt
from polytempo import federated as fed
from polytempo.core.strategy import Privacy, SamplePrivacy
from polytempo.federated.privacy import epsilon
from polytempo.federated.sample_privacy import sample_epsilon


def test_one_round_of_all_clients_is_the_gaussian_mechanism() -> None:
    """ε ≤ α / (2 z²) + ln(1/δ) / (α - 1) for each α > 1; the accountant's conversion is tighter by less than 1."""
    bound = 1 / (2 * 16) + math.sqrt(2 * math.log(1e5)) / 4
    found = epsilon(Privacy(1.0, 4.0, 1e-5, 20), 20, 1)
    assert bound - 0.4 < found < bound + 0.01


def test_epsilon_is_below_the_papers() -> None:
    """The setting of McMahan et al., 2018, table 1, as this accountant counts; half of the rounds leak less."""
    privacy = Privacy(1.0, 1.0, 1e-9, 5_000)
    assert epsilon(privacy, 763_430, 2_060) < epsilon(privacy, 763_430, 4_120) == pytest.approx(3.856, abs=0.01)


def test_a_run_prints_it() -> None:
    job = pt.Job(
        model=lambda: torch.nn.Linear(64, 10),
        data=lambda path: pt.Data(*pt.data.digits()),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )
    strategy = fed.private(fed.fed_avg(cohort=5), noise=2.0)
    result = pt.simulate(job, strategy, workers=2, clients="iid(50)", steps=3)
    assert result.metrics["epsilon"] == epsilon(strategy.rounds.privacy, 50, 3) > 0


def test_passes_over_a_sample_are_one_gaussian_mechanism_with_less_noise() -> None:
    """n mechanisms of noise z are one of noise z / √n; the first one is the round of all clients above."""
    one = sample_epsilon(SamplePrivacy(1.0, 4.0, 1e-5), 1)
    assert one == pytest.approx(epsilon(Privacy(1.0, 4.0, 1e-5, 20), 20, 1), abs=1e-9)
    assert sample_epsilon(SamplePrivacy(1.0, 8.0, 1e-5), 4) == pytest.approx(one, abs=1e-9)
    assert sample_epsilon(SamplePrivacy(1.0, 2.0, 1e-5), 10) == pytest.approx(8.08, abs=0.01)
