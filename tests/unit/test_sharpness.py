"""Measurements around a minimum, against quadratics with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.large_batch.sharpness import LossSurface, flat

lb = pt.large_batch
BENDS = torch.tensor([4.0, 1.0, -0.5, 9.0], dtype=torch.float64)
POINT = torch.tensor([0.5, -1.0, 0.25, 0.1], dtype=torch.float64)


def at(point: Tensor = POINT) -> nn.Parameter:
    return nn.Parameter(point.clone())


def quadratic(x: nn.Parameter, bends: Tensor = BENDS) -> Callable[[], Tensor]:
    """½ Σ Dᵢ xᵢ²."""
    return lambda: (bends * x**2).sum() / 2


def in_parts(x: nn.Parameter) -> Callable[[], Iterator[Tensor]]:
    """The same loss, one term after the other."""
    return lambda: (bend * x[k] ** 2 / 2 for k, bend in enumerate(BENDS))


def test_parts_of_a_loss_add_up_in_value_gradient_and_curvature() -> None:
    x, v = at(), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    whole, parts = LossSurface(quadratic(x), [x]), LossSurface(in_parts(x), [x])
    with parts.kept() as here:
        assert torch.equal(here, POINT)
        assert parts.value(here + 1) == pytest.approx(whole.value(here + 1), rel=1e-12)
        for value, gradient in (whole.gradient(here), parts.gradient(here)):
            assert value == pytest.approx(float(BENDS @ POINT**2) / 2, rel=1e-12)
            torch.testing.assert_close(gradient, BENDS * POINT)
        torch.testing.assert_close(parts.curvature(here, v), BENDS * v)
    assert torch.equal(x.detach(), POINT)


def test_parameters_are_as_they_were_even_after_an_error() -> None:
    x = at()
    surface = LossSurface(lambda: torch.tensor([x.sum()][1]), [x])
    with pytest.raises(IndexError), surface.kept() as here:
        surface.value(here * 2)
    assert torch.equal(x.detach(), POINT)


def test_a_loss_without_a_second_derivative_has_no_curvature() -> None:
    x = at()
    assert not LossSurface(lambda: x.sum(), [x]).curvature(POINT, POINT).any()
    unused = at()
    found = LossSurface(quadratic(x), [x, unused]).curvature(torch.cat([POINT, POINT]), torch.ones(8).double())
    torch.testing.assert_close(found, torch.cat([BENDS, torch.zeros(4).double()]))


def test_the_neighbourhood_loss_is_one_step_of_length_rho_along_the_gradient() -> None:
    x, rho = at(), 0.3
    g = BENDS * POINT
    moved = POINT + rho * g / g.norm()
    assert lb.neighbourhood_loss(quadratic(x), [x], rho) == pytest.approx(float(BENDS @ moved**2) / 2, rel=1e-12)
    assert torch.equal(x.detach(), POINT)
    flat_here = at(torch.zeros(4, dtype=torch.float64))
    assert lb.neighbourhood_loss(quadratic(flat_here), [flat_here], rho) == 0
    with pytest.raises(ValueError, match="rho must be a positive number, got 0"):
        lb.neighbourhood_loss(quadratic(x), [x], 0)


@pytest.mark.parametrize(
    ("bends", "largest"),
    [([4.0, 1.0, -0.5, 9.0], 9.0), ([4.0, 1.0, -90.0, 9.0], 9.0), ([-4.0, -1.0, -3.0, -2.0], -1.0), ([0.0] * 4, 0.0)],
    ids=["largest in size", "a larger negative one", "all negative", "flat"],
)
def test_power_iteration_finds_the_largest_eigenvalue(bends: list[float], largest: float) -> None:
    """The largest value is not the one of largest size: a saddle's steepest way down is not sharpness."""
    x = at()
    found = lb.top_eigenvalue(quadratic(x, torch.tensor(bends).double()), [x], steps=500, tolerance=1e-7)
    assert found.value == pytest.approx(largest, abs=1e-4)
    assert found.residual < 1e-4
    assert torch.equal(x.detach(), POINT)


def test_power_iteration_says_how_far_it_is() -> None:
    """An eigenvalue is within the residual of λ, however few the steps."""
    x = at()
    found = lb.top_eigenvalue(quadratic(x), [x], steps=2, tolerance=0.0)
    assert found.steps == 2
    assert float((BENDS - found.value).abs().min()) <= found.residual
    with pytest.raises(ValueError, match="at least one step, got 0"):
        lb.top_eigenvalue(quadratic(x), [x], steps=0)


def test_the_top_eigenvalue_of_a_network_is_that_of_its_whole_hessian() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data, labels = torch.randn(20, 3).double(), torch.randint(2, (20,))
    parameters = list(model.parameters())

    def loss() -> Iterator[Tensor]:
        for k in (0, 10):
            yield nn.functional.cross_entropy(model(data[k : k + 10]), labels[k : k + 10]) / 2

    surface = LossSurface(loss, parameters)
    here = surface.here()
    columns = [surface.curvature(here, unit) for unit in torch.eye(here.numel(), dtype=torch.float64)]
    expected = float(torch.linalg.eigvalsh(torch.stack(columns))[-1])
    found = lb.top_eigenvalue(loss, parameters, steps=300, tolerance=1e-6)
    assert found.value == pytest.approx(expected, rel=1e-6)


def test_a_line_has_both_models_losses_at_its_ends_and_leaves_the_first() -> None:
    x, other = at(), at(torch.tensor([1.0, 1.0, -1.0, 0.5], dtype=torch.float64))
    ways = [0.0, 0.5, 1.0, 1.5]
    found = lb.losses_between(quadratic(x), [x], [other], ways)
    expected = [float(BENDS @ ((1 - t) * POINT + t * other.detach()) ** 2) / 2 for t in ways]
    assert found == pytest.approx(expected, rel=1e-12)
    assert torch.equal(x.detach(), POINT)
    with pytest.raises(ValueError, match=r"same shapes, got \[\(4,\)\] and \[\(3,\)\]"):
        lb.losses_between(quadratic(x), [x], [torch.zeros(3)], ways)


def test_a_direction_is_as_long_as_the_model_in_each_filter_and_none_along_biases() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    parameters = list(model.parameters())
    found = lb.filter_direction(parameters, seed=4)
    for parameter, part in zip(parameters, found.split([p.numel() for p in parameters]), strict=True):
        if parameter.ndim == 1:
            assert not part.any()
        else:
            lengths = part.view(parameter.shape).flatten(1).norm(dim=1)
            torch.testing.assert_close(lengths, parameter.detach().double().flatten(1).norm(dim=1))
    assert not torch.equal(found, lb.filter_direction(parameters, seed=5))


def test_a_filter_of_zeros_has_no_direction() -> None:
    assert not lb.filter_direction([nn.Parameter(torch.zeros(2, 3))]).any()


def test_a_plane_has_a_row_for_each_way_along_the_second_direction() -> None:
    x, ways = at(), [-1.0, 0.0, 2.0]
    a, b = torch.eye(4, dtype=torch.float64)[:2]
    found = lb.losses_around(quadratic(x), [x], a, b, ways)
    for row, beta in zip(found, ways, strict=True):
        assert row == pytest.approx([float(BENDS @ (POINT + t * a + beta * b) ** 2) / 2 for t in ways], rel=1e-12)
    assert torch.equal(x.detach(), POINT)
    assert math.isclose(found[1][1], float(quadratic(x)().detach()))
    assert torch.equal(flat([x.detach()]), POINT)


CURVES = torch.tensor([4.0, 1.0, 0.25, 9.0], dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [1e-3, 5e-4])
def test_the_sharpness_of_a_quadratic_at_its_minimum_is_exact(epsilon: float) -> None:
    """φ = 50 ε² Σ Dᵢ. A search that began at the minimum would find 0."""
    at = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    found = lb.sharpness(quadratic(at, CURVES), [at], epsilon)
    assert found == pytest.approx(50 * epsilon**2 * float(CURVES.sum()), rel=1e-6)
    assert not at.any()


def test_sharpness_within_a_subspace_is_a_corner_of_its_box_and_leaves_parameters() -> None:
    """A convex loss is largest in a corner. At 0 the box is ε wide in each of the subspace's directions."""
    at = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    found = lb.sharpness(quadratic(at, CURVES), [at], 1e-3, subspace=2, seed=5)
    a = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    corners = [100 * float(CURVES @ (a @ torch.tensor([1e-3, sign * 1e-3]).double()) ** 2) / 2 for sign in (1, -1)]
    assert any(found == pytest.approx(corner, rel=1e-6) for corner in corners)
    assert not at.any()
    moved = nn.Parameter(torch.tensor([0.5, -1.0, 0.25, 0.0], dtype=torch.float64))
    before = moved.detach().clone()
    assert lb.sharpness(quadratic(moved), [moved], seed=1) == lb.sharpness(quadratic(moved), [moved], seed=1) > 0
    assert torch.equal(moved, before)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon": -1e-3}, "epsilon must be a positive number, got -0.001"),
        ({"subspace": 0}, "a step and a dimension at least, got steps=10 and subspace=0"),
        ({"steps": 0}, "got steps=0 and subspace=None"),
    ],
)
def test_a_box_without_an_inside_is_refused(given: dict[str, Any], said: str) -> None:
    at = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=said):
        lb.sharpness(quadratic(at), [at], **given)


def test_sharpness_refuses_a_loss_that_is_not_finite_and_leaves_parameters() -> None:
    at = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="the loss is nan"):
        lb.sharpness(lambda: at.sum() * float("nan"), [at])
    assert not at.any()
