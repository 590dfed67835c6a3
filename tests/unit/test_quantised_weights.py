"""Weights of a few bits in forward: the straight-through estimator, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.jobs.digits import job as digits
from polytempo.training.precision.quantised_weights import quantised

NAMES = ("int8", "int4", "ternary")
BITS = dict(zip(NAMES, (8, 4, 2), strict=True))
SAMPLES, LABELS = (each[:32] for each in pt.data.digits().train.tensors)
job = replace(
    digits,
    data=lambda path: pt.Data(TensorDataset(SAMPLES, LABELS), TensorDataset(SAMPLES, LABELS)),
    batch_size=32,
    lr=0.05,
)


def test_levels_of_a_row() -> None:
    row = torch.tensor([[7.0, -3.4, 0.2, 0.6], [0.0, 0.0, 0.0, 0.0]])
    assert quantised(row, 4).tolist() == [[7.0, -3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    # mean |w| 2.8, Δ 1.96, α = (7 + 3.4) / 2
    torch.testing.assert_close(quantised(row, 2), torch.tensor([[5.2, -5.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_levels_are_few_and_near(bits: int) -> None:
    weight = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(bits))
    found = quantised(weight, bits)
    for row, levels in zip(weight.flatten(1), found.flatten(1), strict=True):
        assert len(levels.unique()) <= 2**bits - 1
        if bits > 2:
            assert float((row - levels).abs().max()) <= float(row.abs().max()) / (2**bits - 2) * (1 + 1e-6)
    torch.testing.assert_close(quantised(found, bits), found)


def trained_plainly(bits: int, steps: int) -> tuple[nn.Module, float]:
    """Masters in a list, Q(w) by hand in forward, torch's SGD on the masters; the loss of Q(w) at the end."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), job.lr)

    def loss() -> Tensor:
        given = {name: _through(p, bits) if p.dim() > 1 else p for name, p in model.named_parameters()}
        return functional.cross_entropy(torch.func.functional_call(model, given, (SAMPLES,)), LABELS)

    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return model, float(loss().detach())


def _through(weight: Tensor, bits: int) -> Tensor:
    return weight + (quantised(weight.detach(), bits) - weight).detach()


@pytest.mark.parametrize("name", NAMES)
def test_training_is_the_straight_through_estimator(name: str) -> None:
    _, loss = trained_plainly(BITS[name], 6)
    for strategy in (pt.strategies.sync_sgd(), pt.strategies.async_sgd()):
        found = pt.simulate(job, strategy, workers=1, steps=6, seed=0, precision=name)
        assert found.loss == pytest.approx(loss, rel=1e-4), strategy.name
        assert found.precision is not None
        assert found.precision["dtype"] == name


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_ones_own_has_quantised_weights_and_float32_masters(name: str) -> None:
    pt.init()
    plain, _ = trained_plainly(BITS[name], 6)
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), job.lr)
    pt.attach(model, optimizer, pt.strategies.sync_sgd(), precision=pt.precision(name))  # type: ignore[arg-type]
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(model(SAMPLES), LABELS).backward()
        optimizer.step()
        assert len(model.get_parameter("0.weight")[0].unique()) <= 2 ** BITS[name] - 1
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-4, atol=1e-5)


def test_both_worlds_reach_the_same_bits_of_two_workers() -> None:
    real = pt.run(job, pt.strategies.local_sgd(period=2), workers=2, steps=4, batch_size=16, precision="int4")
    virtual = pt.simulate(job, pt.strategies.local_sgd(period=2), workers=2, steps=4, batch_size=16, precision="int4")
    assert real.parameters_sha256 == virtual.parameters_sha256


@pytest.mark.parametrize(
    ("strategy", "code", "options"),
    [
        ("gpipe(stages=2)", "PT1408", {}),
        ("split(parts=2)", "PT1409", {}),
        ("shared_memory()", "PT1401", {}),
        ("sync_sgd()", "PT1410", {"min_workers": 1}),
    ],
)
def test_what_quantised_weights_exclude_is_refused(strategy: str, code: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=code):
        pt.run(digits, pt.parse_strategy(strategy), 2, precision="int8", **options)  # type: ignore[arg-type]


def test_a_loss_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="gradients of int8 are float32"):
        pt.precision("int8", loss_scale=2.0)
