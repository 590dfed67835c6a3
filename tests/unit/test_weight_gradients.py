"""Weight gradients that a stage puts off: the same values, and nothing is held once they are there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from polytempo.training.pipeline.parameter_versions import ParameterVersions
from polytempo.training.pipeline.stage_work import StageWork


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
    (given,), _ = work.forward(0, (), [taken], 0, lambda: None)
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
