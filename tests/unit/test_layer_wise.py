"""LARS and LAMB against their papers' formulas, by torch and by the native core."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.large_batch import LAMB, LARS

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
def test_small_tensors_are_stepped_together_and_large_ones_by_the_core(
    make: Make, options: dict[str, Any], by_hand: object
) -> None:
    drawn = torch.Generator().manual_seed(4)
    shapes = ((100, 100), (7,), (3, 5), (5000,))
    values = [torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in shapes]
    found = []
    for fused in (None, False):
        parameters = [nn.Parameter(value.clone()) for value in values]
        optimizer = make(parameters, fused=fused, **options)
        for step in range(STEPS):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = (step + 1) * value.cos()
            optimizer.step()
        found.append([parameter.detach() for parameter in parameters])
    for mixed, by_torch in zip(*found, strict=True):
        torch.testing.assert_close(mixed, by_torch, rtol=1e-12, atol=1e-12)


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
    """A matrix, without weight decay (and with a negligible ε). A bias's step under LARS does."""
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


def test_lars_without_trust_is_refused() -> None:
    """λ would be 0, and the ratio of norms is 1 where one of them is 0."""
    with pytest.raises(ValueError, match="trust is 0, and each layer's step would be"):
        LARS(layers(), lr=0.1, trust=0)


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
