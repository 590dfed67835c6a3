"""What a model in stages has besides weights: layers that keep something from batch to batch, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from pipelines import sgd, staged

s = pt.strategies
mse = nn.functional.mse_loss
random = torch.Generator().manual_seed(5)
BATCHES = [
    tuple(torch.randn(8, *shape, generator=random, dtype=torch.float64) for shape in ((3, 6), (2,))) for _ in range(6)
]


class Codebook(nn.Module):
    """A layer whose answer depends on a buffer that each pass moves."""

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
