"""LARS' and LAMB's part of the native core: one pass that also sums squares, the same bits on any processor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from native.kernels import choose, instruction_sets, library
from polytempo.native.kernels.step import Hyper
from polytempo.native.kernels.update import lamb_direction_, squares
from polytempo.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no native core here")
SIZES = [0, 1, 15, 16, 17, 511, 512, 513, 5000]
BETA1, BETA2, EPS, DECAY, STEP = 0.9, 0.99, 1e-6, 0.01, 3


def numbers(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradient, weights, first and second moment."""
    drawn = torch.Generator().manual_seed(numel)
    g, w, m, v = (torch.randn(numel, generator=drawn, dtype=torch.float64).to(dtype) for _ in range(4))
    return [g, w, m, v.square()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_squares_are_summed_in_sixteen_lanes_of_each_block(isa: str, dtype: torch.dtype, numel: int) -> None:
    g, w, *_ = numbers(numel, dtype)
    for found, values in zip(squares(g, w), (g, w), strict=True):
        lanes = [0.0] * 16
        for i, value in enumerate(values.double().tolist()):
            lanes[i % 16] += value * value
        total = 0.0
        for lane in lanes:
            total += lane
        assert found == total


def summed_in_blocks(values: Tensor) -> float:
    """Σ x² as LAMB's kernel sums: 16 lanes of each 512 elements in their dtype, these then in float64."""
    lanes = torch.zeros(16, dtype=torch.float64)
    for block in values.split(512):
        own = torch.zeros(16, dtype=values.dtype)
        for row in block.split(16):
            own[: len(row)] += row * row
        lanes += own.double()
    total = 0.0
    for lane in lanes.tolist():
        total += lane
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_lamb_s_direction_is_its_formula(isa: str, dtype: torch.dtype, numel: int) -> None:
    g, w, m, v = numbers(numel, dtype)

    def rounded(value: float) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    first = m + rounded(1 - BETA1) * (g - m)
    second = rounded(BETA2) * v + rounded(1 - BETA2) * (g * g)
    root = second.sqrt() * rounded(1 / math.sqrt(1 - BETA2**STEP)) + rounded(EPS)
    quotient = rounded(1 / (1 - BETA1**STEP)) * first / root
    hyper = Hyper(beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY, step=STEP)
    u = torch.empty_like(w)
    sums = lamb_direction_(hyper, g, w, m, v, u)
    assert torch.equal(m, first)
    assert torch.equal(v, second)
    terms = quotient.abs() + (DECAY * w).abs()
    assert ((u - quotient - DECAY * w).abs() <= 4 * torch.finfo(dtype).eps * terms).all()
    assert sums == (summed_in_blocks(w), summed_in_blocks(u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_instruction_sets_have_the_same_bits(dtype: torch.dtype) -> None:
    before, found = library().pt_isa().decode(), []
    for isa in instruction_sets():
        assert choose(isa)
        g, w, m, v = numbers(5000, dtype)
        u = torch.empty_like(w)
        hyper = Hyper(beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY, step=STEP)
        found.append((lamb_direction_(hyper, g, w, m, v, u), u))
    choose(before)
    for sums, u in found:
        assert sums == found[0][0]
        assert torch.equal(u, found[0][1])


def test_what_has_no_kernel_is_no_silent_zero() -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="no kernel"):
        squares(half, half)
