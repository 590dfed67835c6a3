"""A step of plain SGD that looks at its gradient on the way: the bits of `update`, and the first NaN or infinity."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polytempo.native.kernels.step import RULES, Hyper
from polytempo.native.kernels.update import Updater, copy_
from polytempo.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no native core here")
LARGE = (24 << 20) // 4 + 1001
"""A few elements of f32 more than the least number written past the caches."""


def updater(dtype: torch.dtype = torch.float32, rule: str = "sgd", momentum: float = 0.0) -> Updater:
    return Updater(Hyper(lr=0.3, weight_decay=0.01, momentum=momentum, rule=RULES[rule], maximize=True), dtype)


def numbers(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    weights = torch.linspace(-3, 5, numel, dtype=dtype)
    return weights, weights.cos()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 5000])
def test_it_has_the_bits_of_an_update(isa: str, dtype: torch.dtype, numel: int) -> None:
    weights, gradient = numbers(numel, dtype)
    expected, out = torch.empty_like(weights), torch.empty_like(weights)
    updater(dtype).update_([gradient], [0.7], weights, expected)
    assert updater(dtype).descend_(gradient, 0.7, weights, out) == -1
    assert torch.equal(out, expected)


@pytest.mark.parametrize("offset", [0, 3, 16])
def test_so_it_has_past_the_caches_wherever_lines_begin(isa: str, offset: int) -> None:
    weights, gradient = numbers(LARGE)
    expected, memory = torch.empty_like(weights), torch.full((LARGE + 32,), 7.0)
    updater().update_([gradient], [1.0], weights, expected)
    assert updater().descend_(gradient, 1.0, weights, memory[offset : offset + LARGE]) == -1
    assert torch.equal(memory[offset : offset + LARGE], expected)
    assert torch.equal(memory[:offset], torch.full((offset,), 7.0))
    assert torch.equal(memory[offset + LARGE :], torch.full((32 - offset,), 7.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_first_number_that_is_none_is_found(isa: str, dtype: torch.dtype, bad: float) -> None:
    weights, gradient = numbers(1000, dtype)
    gradient[1] = torch.finfo(dtype).max
    for index in (999, 512, 128, 127, 0):
        gradient[index] = bad
        assert updater(dtype).descend_(gradient, 1.0, weights, torch.empty_like(weights)) == index


@pytest.mark.parametrize(("rule", "momentum"), [("sgd", 0.9), ("adam", 0.0), ("adagrad", 0.0)])
def test_it_is_for_plain_sgd_alone(rule: str, momentum: float) -> None:
    weights, gradient = numbers(8)
    with pytest.raises(AssertionError, match="refuses"):
        updater(rule=rule, momentum=momentum).descend_(gradient, 1.0, weights, torch.empty(8))


@pytest.mark.parametrize("numel", [0, 5, (1 << 18) + 3, LARGE])
def test_a_copy_is_a_copy(isa: str, numel: int) -> None:
    source, memory = torch.arange(numel + 2, dtype=torch.float32)[1:-1], torch.full((numel + 6,), -1.0)
    copy_(memory[3:-3], source)
    assert torch.equal(memory[3:-3], source)
    assert memory[:3].tolist() == memory[-3:].tolist() == [-1.0] * 3


def test_a_copy_between_types_or_strides_is_torchs() -> None:
    source = torch.arange(1 << 20, dtype=torch.float64)
    out = torch.empty(1 << 20)
    copy_(out, source)
    assert torch.equal(out, source.float())
    copy_(out[: 1 << 19], source[::2].float())
    copy_(out[1::2], source[: 1 << 19])
    assert torch.equal(out[1::2].double(), source[: 1 << 19])
