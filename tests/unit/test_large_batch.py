"""Optimizers, rates and measures of large batches, against their papers' formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.large_batch import LAMB, LARS, NoiseScale, Squares
from polytempo.training.rate_schedule import RateSchedule
from polytempo.training.schedule_state import schedule_restore, schedule_saved

lb = pt.large_batch
Make = Callable[..., Optimizer]
LAYERS = ((7, 5), (5,), (3, 5), (3,))
STEPS = 4


def layers(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)) for shape in LAYERS]


def gradients(step: int, times: float = 1.0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    return [times * torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in LAYERS]


def trained(make: Make, times: float = 1.0, dtype: torch.dtype = torch.float64, **options: Any) -> list[Tensor]:
    """The parameters after some steps with the same gradients."""
    parameters = layers(dtype)
    optimizer = make(parameters, **options)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step, times), strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def lars_by_hand(lr: float, momentum: float, weight_decay: float, trust: float) -> list[Tensor]:
    """Algorithm 1, a tensor at a time, without torch's optimizers."""
    ended = []
    for place, w in enumerate(layers()):
        now, v = w.detach().clone(), torch.zeros(())
        for step in range(STEPS):
            g = gradients(step)[place]
            matrix = now.ndim > 1
            beta = weight_decay if matrix else 0.0
            local = trust * now.norm() / (g.norm() + beta * now.norm()) if matrix else 1.0
            v = momentum * v + lr * local * (g + beta * now)
            now = now - v
        ended.append(now)
    return ended


def lamb_by_hand(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> list[Tensor]:
    """Algorithm 2, a tensor at a time."""
    ended = []
    for place, w in enumerate(layers()):
        now, m, v = w.detach().clone(), torch.zeros(()), torch.zeros(())
        for step in range(STEPS):
            g = gradients(step)[place]
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
            u = (m / (1 - betas[0] ** (step + 1))) / ((v / (1 - betas[1] ** (step + 1))).sqrt() + eps)
            if now.ndim > 1:
                u = u + weight_decay * now
                u = u * now.norm() / u.norm()
            now = now - lr * u
        ended.append(now)
    return ended


LARS_OPTIONS: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02}
LAMB_OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
BOTH = [(LARS, LARS_OPTIONS, lars_by_hand), (LAMB, LAMB_OPTIONS, lamb_by_hand)]
named = pytest.mark.parametrize(("make", "options", "by_hand"), BOTH, ids=["LARS", "LAMB"])


@named
@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizer_is_the_papers_algorithm(
    make: Make, options: dict[str, Any], by_hand: Callable[..., list[Tensor]], fused: bool
) -> None:
    for found, expected in zip(trained(make, fused=fused, **options), by_hand(**options), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@named
def test_the_kernels_and_torch_agree_in_float32(make: Make, options: dict[str, Any], by_hand: object) -> None:
    kernels, by_torch = (trained(make, dtype=torch.float32, fused=fused, **options) for fused in (True, False))
    for one, other in zip(kernels, by_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@named
def test_a_layers_step_does_not_depend_on_the_scale_of_the_loss(
    make: Make, options: dict[str, Any], by_hand: object
) -> None:
    """Of a matrix, without weight decay (and with an ε that is nothing). A bias's step under LARS does."""
    free = options | {"weight_decay": 0.0} | ({"eps": 0.0} if make is LAMB else {})
    once, often = trained(make, **free), trained(make, times=1000.0, **free)
    for place in (0, 2):
        torch.testing.assert_close(once[place], often[place], rtol=1e-12, atol=1e-12)
    same = torch.allclose(once[1], often[1], rtol=1e-9)
    assert same == (make is LAMB)


@named
def test_a_layer_of_zeros_or_without_a_gradient_is_stepped_with_ratio_1(
    make: Make, options: dict[str, Any], by_hand: object
) -> None:
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make([zero, still], **(options | {"weight_decay": 0.0}))
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    assert zero.isfinite().all()
    assert bool((zero == -options["lr"]).all()) == (make is LARS)
    assert torch.equal(still, torch.ones(2, 2))


@named
def test_groups_say_whether_they_adapt(make: Make, options: dict[str, Any], by_hand: object) -> None:
    """`adapts=False` for all is momentum SGD, or Adam, with the rate within the momentum."""
    plain = trained(make, **options, adapts=False)
    chosen = trained(make, **options, adapts=True)
    by_default = trained(make, **options)
    for place, shape in enumerate(LAYERS):
        assert torch.equal(by_default[place], (chosen if len(shape) > 1 else plain)[place])
        assert not torch.equal(chosen[place], plain[place])


@named
def test_state_goes_into_a_checkpoint_and_back(make: Make, options: dict[str, Any], by_hand: object) -> None:
    parameters = layers()
    optimizer = make(parameters, **options)
    for step in range(2):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    again = layers()
    for new, old in zip(again, parameters, strict=True):
        new.data.copy_(old.data)
    resumed = make(again, **options)
    resumed.load_state_dict(json_and_tensors(optimizer.state_dict()))
    for step in range(2, STEPS):
        for parameter, gradient in zip(again, gradients(step), strict=True):
            parameter.grad = gradient
        resumed.step()
    for one, other in zip(again, trained(make, **options), strict=True):
        assert torch.equal(one.detach(), other)


def json_and_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON takes them: nothing in them is a function."""
    return {"state": state["state"], "param_groups": json.loads(json.dumps(state["param_groups"]))}


@named
def test_wrong_numbers_and_sparse_gradients_are_refused(make: Make, options: dict[str, Any], by_hand: object) -> None:
    with pytest.raises(ValueError, match="weight_decay must be a number of at least 0, got -1"):
        make(layers(), **(options | {"weight_decay": -1}))
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="make the embedding with sparse=False"):
        make(table.parameters(), **options).step()


# ---------------------------------------------------------------------- learning rates


def test_rates_grow_with_the_batch() -> None:
    assert (lb.linear(8), lb.square_root(16)) == (8, 4)
    assert lb.adam(4, 0.001, (0.9, 0.999), 1e-8) == {
        "lr": 0.002,
        "betas": (pytest.approx(0.6), pytest.approx(0.996)),
        "eps": 5e-9,
    }
    with pytest.raises(ValueError, match="can be 10 times as large at most, got 11"):
        lb.adam(11, 0.001)
    with pytest.raises(ValueError, match="times must be a positive number, got 0"):
        lb.linear(0)


def rates(*factors: Any, steps: int, steps_per_epoch: int = 2) -> list[float]:
    """The learning rates of the first steps, of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lb.schedule(*factors)(optimizer, steps_per_epoch)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_rates_warm_up_and_fall_step_by_step() -> None:
    """Goyal: from η to kη in equal increments; what falls counts from the beginning of the run."""
    assert rates(lb.warm_up(2, start=0.2), steps=6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert rates(lb.warm_up(1, start=0.2, constant=True), lb.falling([1.5]), steps=5) == pytest.approx(
        [0.2, 0.2, 1, 0.1, 0.1]
    )
    assert rates(lb.polynomial(2, 0.5), steps=6) == pytest.approx([1, 0.75**0.5, 0.5**0.5, 0.5, 0, 0])
    assert rates(lb.cosine(2, end=0.1), steps=6) == pytest.approx(
        [1, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1, 0.1]
    )


def test_a_schedule_resumes_and_serves_tickets() -> None:
    make = lb.schedule(lb.warm_up(1, start=0.5), lb.cosine(4))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, 4)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    saved, rate = schedule_saved(scheduler), optimizer.param_groups[0]["lr"]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    resumed = make(other, 4)
    schedule_restore(resumed, saved)
    other.load_state_dict(optimizer.state_dict())
    for one in (optimizer, other):
        one.step()
    scheduler.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != rate
    served = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    tickets = RateSchedule(served, make, steps_per_epoch=4, batches=12)
    tickets.go_to(tickets.step_of(1, 3))
    assert served.param_groups[0]["lr"] == rate


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


# ---------------------------------------------------------------------- measures


def test_the_noise_scale_of_a_gaussian_is_found_within_3_percent() -> None:
    """Gradients G + noise of variance Σ, over 4 workers of 8 samples: B_simple = tr Σ / |G|²."""
    drawn = torch.Generator().manual_seed(3)
    true = torch.linspace(-1, 1, 200, dtype=torch.float64)
    deviations = torch.linspace(0.5, 3, 200, dtype=torch.float64)
    expected = float((deviations**2).sum() / (true**2).sum())
    found = NoiseScale(keeps=0.999)
    for _ in range(2000):
        noise = torch.randn(4, 200, generator=drawn, dtype=torch.float64) * deviations / math.sqrt(8)
        local = true + noise
        small = float((local**2).sum(1).mean())
        found.add(lb.squares(small, 8, float((local.mean(0) ** 2).sum()), 32))
    assert found.simple == pytest.approx(expected, rel=0.03)


def test_means_are_divided_not_averaged() -> None:
    """One step in which the gradient is not seen does not spoil what the others have found."""
    found = NoiseScale(keeps=0.5)
    for step in (Squares(1.0, 10.0), Squares(-0.25, 10.0), Squares(1.0, 10.0)):
        found.add(step)
    of_gradient = (0.125 * 1.0 - 0.25 * 0.25 + 0.5 * 1.0) / 0.875
    assert found.mean == pytest.approx((of_gradient, 10.0))
    assert found.simple == pytest.approx(10.0 / of_gradient)
    found.add(Squares(-100.0, 10.0))
    assert found.simple == math.inf


def test_noise_scale_refuses_what_it_cannot_know() -> None:
    with pytest.raises(ValueError, match="got 8 and 8 samples"):
        lb.squares(1.0, 8, 1.0, 8)
    with pytest.raises(ValueError, match="no step has been added"):
        _ = NoiseScale().simple


def test_a_batch_of_the_noise_scale_takes_twice_the_fewest_steps() -> None:
    assert lb.speed_up(1e12, 100) / lb.speed_up(100, 100) == pytest.approx(2)
    assert lb.speed_up(1, 100) == 1


CURVES = torch.tensor([4.0, 1.0, 0.25, 9.0], dtype=torch.float64)


def quadratic(at: nn.Parameter) -> Callable[[], Tensor]:
    return lambda: (CURVES * at**2).sum() / 2


@pytest.mark.parametrize("epsilon", [1e-3, 5e-4])
def test_the_sharpness_of_a_quadratic_at_its_minimum_is_exact(epsilon: float) -> None:
    """φ = 50 ε² Σ Dᵢ. A search that began at the minimum would find 0."""
    at = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    found = lb.sharpness(quadratic(at), [at], epsilon)
    assert found == pytest.approx(50 * epsilon**2 * float(CURVES.sum()), rel=1e-6)
    assert not at.any()


def test_sharpness_within_a_subspace_is_a_corner_of_its_box_and_leaves_parameters() -> None:
    """A convex loss is largest in a corner. At 0 the box is ε wide in each of the subspace's directions."""
    at = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    found = lb.sharpness(quadratic(at), [at], 1e-3, subspace=2, seed=5)
    a = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    corners = [100 * float(CURVES @ (a @ torch.tensor([1e-3, sign * 1e-3]).double()) ** 2) / 2 for sign in (1, -1)]
    assert any(found == pytest.approx(corner, rel=1e-6) for corner in corners)
    assert not at.any()
    moved = nn.Parameter(torch.tensor([0.5, -1.0, 0.25, 0.0], dtype=torch.float64))
    before = moved.detach().clone()
    assert lb.sharpness(quadratic(moved), [moved], seed=1) == lb.sharpness(quadratic(moved), [moved], seed=1) > 0
    assert torch.equal(moved, before)


def test_sharpness_refuses_a_loss_that_is_not_finite_and_leaves_parameters() -> None:
    at = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="the loss is nan"):
        lb.sharpness(lambda: at.sum() * float("nan"), [at])
    assert not at.any()


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


@pytest.mark.parametrize("fused", [None, False])
def test_corrected_momentum_is_torchs_sgd_under_a_schedule(fused: bool | None) -> None:
    """Torch multiplies by the rate after the momentum, so that all earlier steps have the present rate."""
    ours, torchs = layers(), layers()
    pairs = [
        (ours, LARS(ours, lr=0.1, adapts=False, corrects_momentum=True, fused=fused)),
        (torchs, torch.optim.SGD(torchs, lr=0.1, momentum=0.9)),
    ]
    for parameters, optimizer in pairs:
        for step, rate in enumerate((0.1, 0.1, 0.4, 0.02, 0.02)):
            optimizer.param_groups[0]["lr"] = rate
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient
            optimizer.step()
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def test_momentum_begins_again_after_a_rate_of_zero() -> None:
    """There is no ratio to a rate of 0."""
    parameters = layers()
    optimizer = LARS(parameters, lr=0.1, corrects_momentum=True)
    for rate in (0.1, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(parameters, gradients(0), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)
