"""The state of a model in stages other than weights: layers that keep values from batch to batch, against plain
torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import polytempo as pt
from pipelines import sgd, staged

s = pt.strategies
mse = nn.functional.mse_loss
random = torch.Generator().manual_seed(5)
BATCHES = [
    tuple(torch.randn(8, *shape, generator=random, dtype=torch.float64) for shape in ((3, 6), (2,))) for _ in range(6)
]


class Codebook(nn.Module):
    """A layer with an answer that depends on a buffer, which each pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """x: of any shape."""
        with torch.no_grad():
            self.mean.lerp_(x.square().mean(), 0.3)
        return x * self.mean.clone()


KEEPING = {
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "BatchNorm with momentum=None": lambda: nn.BatchNorm1d(4, momentum=None),
    "a buffer that is used": Codebook,
}


def model_with(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model with the layer in either half."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        first = [nn.Conv1d(3, 4, 3), layer(), nn.Tanh()]
        second = [nn.Conv1d(4, 4, 3), layer(), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)]
        return nn.Sequential(*first, *second).double()

    return make


def plainly(make: Callable[[], nn.Module], micro_batches: int) -> dict[str, Tensor]:
    """One process, which adds the gradients of micro-batches up."""
    model = make()
    optimizer = sgd(model)
    for x, y in BATCHES:
        optimizer.zero_grad()
        for inputs, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            (mse(model(inputs), target) / micro_batches).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("strategy", [s.gpipe(2, 4), s.features_replay(1)], ids=str)
@pytest.mark.parametrize("name", KEEPING)
def test_buffers_change_once_a_micro_batch(name: str, strategy: pt.Strategy) -> None:
    """Also where a stage computes a micro-batch again on its way back."""
    make = model_with(KEEPING[name])
    ours = staged(make, strategy, mse, BATCHES).state
    for key, expected in plainly(make, strategy.schedule.micro_batches).items():
        torch.testing.assert_close(ours[key], expected, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("strategy", [s.ddg(2), s.features_replay(2)], ids=str)
def test_what_is_under_way_goes_on_with_the_buffers_that_it_began_with(strategy: pt.Strategy) -> None:
    make = model_with(Codebook)
    straight, again = (staged(make, strategy, mse, BATCHES, resumed_after=at).state for at in (0, 3))
    for key, expected in straight.items():
        assert torch.equal(again[key], expected), key


def test_a_stage_cannot_be_clipped_by_its_own_norm() -> None:
    """Neither by torch's function in a hook of the optimizer."""

    def clipping(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    make = model_with(Codebook)
    with pytest.raises(ValueError, match="max_norm="):
        staged(make, s.one_f_one_b(2, 4), mse, BATCHES, optimizer=clipping)
    staged(make, s.one_f_one_b(1, 4), mse, BATCHES, optimizer=clipping)


def hooked(layer: nn.Linear) -> nn.Module:
    """The gradients are changed before they are added."""
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    return layer


def old_weight_norm(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


CHANGING: list[Callable[[nn.Linear], nn.Module]] = [parametrizations.weight_norm, old_weight_norm, hooked]


@pytest.mark.parametrize("change", CHANGING)
def test_weights_that_are_made_of_others_and_hooks_of_gradients(change: Callable[[nn.Linear], nn.Module]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        ends = [[nn.Tanh(), change(nn.Linear(*sizes).double())] for sizes in ((18, 6), (6, 2))]
        return nn.Sequential(nn.Flatten(), *ends[0], *ends[1])

    ours = staged(make, s.zero_bubble(2, 2), mse, BATCHES).state
    for key, expected in plainly(make, 2).items():
        torch.testing.assert_close(ours[key], expected, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("inner", [s.sync_sgd(), s.diloco(period=2)], ids=str)
@pytest.mark.parametrize("part", [0, 1])
def test_a_stage_may_be_frozen(part: int, inner: pt.Strategy) -> None:
    """The optimizer may get no parameter."""

    def make(*, whole: bool = False) -> nn.Module:
        model = model_with(KEEPING["BatchNorm"])()
        halves = list(model.children())[:3], list(model.children())[3:]
        for layer in halves[0] + halves[1] if whole else halves[part]:
            layer.requires_grad_(requires_grad=False)
        return model

    strategy = s.one_f_one_b(2, 2, inner=inner)
    ours, one = (staged(make, strategy, mse, BATCHES, replicas=replicas, max_norm=9.0) for replicas in (2, 1))
    for key, expected in (plainly(make, 2) if inner.synchronized else one.state).items():
        torch.testing.assert_close(ours.state[key], expected, rtol=0, atol=1e-12, msg=key)
    with pytest.raises(ValueError, match="nothing to train"):
        staged(partial(make, whole=True), strategy, mse, BATCHES)
