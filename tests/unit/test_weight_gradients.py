"""Weight gradients that a stage puts off: the same values, and nothing is held once they are there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from polytempo.training.pipeline.late.parameter_versions import ParameterVersions
from polytempo.training.pipeline.stage_work import StageWork, UnderWay


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Inside, only the last reference frees an object."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _model(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    if kind == "linear":
        return nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4)), torch.randn(3, 5)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)), torch.randn(3, 2, 8, 8)


class _Given(nn.Module):
    """A part that gives its output to others, as the stages of a cut do."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x),)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.usefixtures("_no_collector")
def test_what_a_late_weight_gradient_needs_is_free_once_it_is_there(kind: str) -> None:
    layers, x = _model(kind)
    work = StageWork(_Given(layers), ParameterVersions(list(layers.parameters()), stashes=True), splits=True, sums=True)
    taken = x.clone()
    (given,), _ = work.forward(0, UnderWay((), [taken], 0, lambda: None))
    held = weakref.ref(work.under_way[0].taken[0])
    work.backward(0, [torch.ones_like(given)])
    assert all(p.grad is None for p in layers.parameters())
    assert held() is not None
    work.weight_gradients(0)
    assert held() is None

    late = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    layers(x).backward(torch.ones_like(given))
    for p, gradient in zip(layers.parameters(), late, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-5, atol=1e-5)


class _Scaled(nn.Module):
    """Changes its argument, as `nn.ReLU(inplace=True)` does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def _late(layers: nn.Module, x: Tensor, *, needs_gradient: bool) -> list[Tensor | None]:
    """The parameters' gradients after both halves."""
    work = StageWork(_Given(layers), ParameterVersions(list(layers.parameters()), stashes=True), splits=True, sums=True)
    inputs, taken = ((), [x.clone()]) if needs_gradient else ((x.clone(),), [])
    (given,), _ = work.forward(0, UnderWay(inputs, taken, 0, lambda: None))
    work.backward(0, [torch.ones_like(given)])
    work.weight_gradients(0)
    return [p.grad for p in layers.parameters()]


@pytest.mark.parametrize("needs_gradient", [True, False], ids=["within", "first"])
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 3, 3, padding=1), _Scaled(), nn.Conv2d(3, 2, 3, stride=2, bias=False)],
        [nn.Conv2d(2, 4, 3, padding="same"), nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect", groups=2)],
        [nn.Flatten(2), nn.Conv1d(2, 3, 5, dilation=2), nn.Conv1d(3, 1, 1)],
    ],
    ids=["changed output", "padding", "one dimension"],
)
def test_late_gradients_of_convolutions_are_those_of_autograd(layers: list[nn.Module], needs_gradient: bool) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(*deepcopy(layers)).double(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    late = _late(model, x, needs_gradient=needs_gradient)
    model.zero_grad()
    model(x).backward(torch.ones_like(model(x)))
    for p, gradient in zip(model.parameters(), late, strict=True):
        torch.testing.assert_close(gradient, p.grad)


def test_an_input_that_was_changed_in_place_is_refused_as_autograd_refuses_it() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3))

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            y: Tensor = self.layers(h)
            h.mul_(2.0)
            return y

    with pytest.raises(RuntimeError, match=r"input \[3, 2, 8, 8\] of Conv2d.*changed in place.*inplace=False"):
        _late(Changing(), torch.randn(3, 2, 8, 8), needs_gradient=True)
