"""FireCaffe's recipe, and the parts of training with a large batch: weight decay, zero gains, norms over few
samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job

lb = pt.large_batch


def test_firecaffes_recipe_is_the_papers_for_network_in_network() -> None:
    """32 workers: B = 1024 and γ = 0.04 from 256 samples at 0.01, momentum 0.9, decay 0.0005, √(1 - t/T)."""
    recipe = lb.firecaffe(32, lr=0.01, batch_size=256, each=32, epochs=4)
    assert (recipe.global_batch_size, recipe.lr) == (1024, pytest.approx(0.04))
    model = nn.Linear(3, 2)
    optimizer = recipe.optimizer(model.parameters())
    assert [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.9, 5e-4), (0.9, 0.0)]
    scheduler = recipe.schedule(optimizer, 10)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.04 * math.sqrt(1 - step / 40) for step in range(40)])
    assert optimizer.param_groups[1]["lr"] == 0


def test_a_recipe_makes_a_job_of_a_job() -> None:
    recipe = lb.firecaffe(4, lr=0.01, batch_size=16, epochs=1)
    done = pt.simulate(recipe.of_job(job), pt.strategies.sync_sgd(), workers=4, threads=1)
    plain = pt.simulate(
        replace(job, optimizer=recipe.optimizer, schedule=recipe.schedule, lr=0.04, batch_size=16, epochs=1),
        pt.strategies.sync_sgd(),
        workers=4,
        threads=1,
    )
    assert done.parameters_sha256 == plain.parameters_sha256
    assert done.epochs == 1


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"workers": 0}, "workers must be a positive number, got 0"),
        ({"each": 0}, "each must be a positive"),
        ({"momentum": 1.0}, "momentum is at least 0 and below 1"),
    ],
)
def test_a_recipe_refuses_what_is_no_number_of_a_run(wrong: dict[str, Any], complaint: str) -> None:
    given = {"workers": 2, "lr": 0.1, "batch_size": 8, "epochs": 1, **wrong}
    with pytest.raises(ValueError, match=complaint):
        lb.firecaffe(given.pop("workers"), **given)


@pytest.mark.parametrize(("times", "rate_times", "decay"), [(16, 16, 0.01), (16, 4, 0.04), (1, 1, 0.01)])
def test_weight_decay_of_an_epoch_stays_what_it_was(times: float, rate_times: float, decay: float) -> None:
    found = lb.same_decay(0.01, times, rate_times)
    assert found == pytest.approx(decay)
    steps, rate = 64, 0.1
    before = steps * rate * 0.01
    assert steps / times * rate * rate_times * found == pytest.approx(before)


def test_batch_norms_over_few_samples_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(3), nn.BatchNorm1d(3))
    assert lb.norms_of_few(model, 8) == ["1", "4"]
    assert lb.norms_of_few(model, 32) == []
    assert lb.norms_of_few(nn.Linear(2, 2), 1) == []


def test_only_weights_decay_and_gains_begin_at_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.LayerNorm(2))
    weights, rest = lb.decayed(model, 0.5)
    assert [tuple(p.shape) for p in weights["params"]] == [(4, 3), (2, 4)]
    assert (weights["weight_decay"], rest["weight_decay"], len(rest["params"])) == (0.5, 0, 6)
    assert lb.zero_gains_(model, "1") == ["1"]
    assert not model[1].weight.any()
    assert model[3].weight.all()
    with pytest.raises(ValueError, match="no norm of this model is called '0'; with a gain: 1, 3"):
        lb.zero_gains_(model, "0")
    with pytest.raises(ValueError, match="weight_decay must be a number of at least 0, got -1"):
        lb.decayed(model, -1)
