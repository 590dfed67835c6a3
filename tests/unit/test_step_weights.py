"""Weights of several batches in one backward pass: their gradients are scaled once, behind the model's outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polytempo.core.calls.refusals import Incompatible
from polytempo.training.hooks.step_weights import StepWeights, scale_output_gradients
from polytempo.worlds.process.shares import Batch


class Hidden(nn.Module):
    """A model with an output that another output is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.inner(x).tanh()
        return {"hidden": [hidden], "logits": self.head(hidden), "name": "x"}


def gradients(net: nn.Module, factor: float) -> list[Tensor]:
    net.zero_grad()
    scale_output_gradients(net, factor)
    out = net(torch.linspace(-1, 1, 6).reshape(2, 3))
    (out["logits"].square().sum() + out["hidden"][0].sum()).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("factor", [0.25, 3.0, 0.0])
def test_an_output_made_of_another_counts_once(factor: float) -> None:
    net = Hidden()
    plain = gradients(net, 1.0)
    for scaled, whole in zip(gradients(net, factor), plain, strict=True):
        torch.testing.assert_close(scaled, factor * whole)
    for again, whole in zip(gradients(net, 1.0), plain, strict=True):
        assert torch.equal(again, whole)


class Own(dict[str, Any]):
    """A dictionary that torch does not map over."""


@pytest.mark.parametrize("kind", [SimpleNamespace, Own])
def test_outputs_that_cannot_be_scaled_are_refused(kind: Any) -> None:
    class Boxed(Hidden):
        def forward(self, x: Tensor) -> Any:
            return kind(logits=self.head(self.inner(x)))

    net = Boxed()
    scale_output_gradients(net, 0.5)
    with pytest.raises(Incompatible, match=rf"PT1116: .*{kind.__name__}"):
        net(torch.zeros(2, 3))


@pytest.mark.parametrize(
    "passes",
    [
        [[6.0], [2.0]],
        [[6.0, 2.0]],
        [[0.0, 2.0]],
        [[2.0, 0.0]],
        [[0.0]],
        [[6.0, 2.0], [1.0, 0.0, 3.0]],
        [[0.0, 0.0], [5.0]],
    ],
    ids=str,
)
def test_a_steps_gradient_is_the_mean_by_weights(passes: list[list[float]]) -> None:
    """Each list is one backward pass of batches with these weights. A batch of weight 0 has a loss of NaN."""
    net = nn.Linear(3, 1).double()
    weights, drawn = StepWeights(net.parameters()), torch.Generator().manual_seed(0)
    expected, total = torch.zeros(3, dtype=torch.float64), sum(map(sum, passes))
    for each in passes:
        losses = []
        for weight in each:
            x = torch.randn(1, 3, generator=drawn, dtype=torch.float64)
            assert weights.take(Batch(None, [], frozenset(), (), weight), net)
            losses.append(net(x).sum() if weight else net(x).sum() * torch.nan)
            expected += weight * x[0] / (total or 1)
        torch.stack(losses).sum().backward()
    assert net.weight.grad is not None
    torch.testing.assert_close(net.weight.grad[0], expected, rtol=1e-12, atol=1e-12)
