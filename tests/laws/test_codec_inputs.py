"""Laws of every codec of the catalogue about its inputs: accepted tensors, and the ends of their range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laws.codecs import ROWS, Row, text
from polytempo.compression import feedback, random_k, terngrad
from polytempo.core import Codec, EncodeContext
from some_cases import examples

every_codec = pytest.mark.parametrize("row", ROWS, ids=text)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CLIPS = [0.1, 0.5, 1.0, 1.2, 2.5, 4.0, 6.0]
CONSERVING = [row.make() for row in ROWS if row.law == "conserving"]
BOUNDED = [codec for codec in CONSERVING if 0 < codec.facts.law.bound(torch.empty(100)) < math.inf]


@every_codec
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64], ids=str)
def test_whole_and_complex_numbers_are_refused(row: Row, dtype: torch.dtype) -> None:
    """Alone, and with a residual; so no codec can make a wire that it does not understand."""
    codec, x = row.make(), torch.arange(1600).view(40, 40).to(dtype)
    ways = [lambda: codec.encode(x)]
    if not row.feeds_itself:
        ways.append(lambda: codec.encode_(x, torch.zeros_like(x)))
    if row.feedable:
        ways.append(lambda: feedback(codec).encode(x))
    for encode in ways:
        with pytest.raises(TypeError, match=f"codecs take dense tensors of float32.*got {dtype}"):
            encode()


@every_codec
def test_a_parameter_is_encoded_without_its_gradient(row: Row) -> None:
    """And without a warning of torch, which is an error here."""
    codec, x = row.make(), torch.nn.Parameter(torch.linspace(-1, 2, 1600).view(40, 40))
    wire, _ = codec.encode(x)
    assert not wire.requires_grad
    assert not codec.decode(wire, x).requires_grad
    if not row.feeds_itself:
        residual = torch.zeros(40, 40)
        assert not codec.encode_(x, residual)[0].requires_grad
        assert not residual.requires_grad


@every_codec
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_finite_arrives_finite(row: Row, dtype: torch.dtype) -> None:
    """Scaled and rounded-up values too, near the largest number of the dtype."""
    most = torch.finfo(dtype).max if dtype is not torch.float64 else float(torch.finfo(torch.float32).max)
    for step, share in enumerate([1.0, 0.99, 1e-3], start=1):
        codec, x, when = row.make(), torch.full((40, 40), most * share, dtype=dtype), EncodeContext(step)
        x.view(-1)[::3] *= -1
        assert codec.decode(codec.encode(x, None, when)[0], x, when).isfinite().all()


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 1000.0), (torch.float32, 1e37), (torch.float64, 1e308)])
def test_what_random_k_scales_up_stays_in_range(dtype: torch.dtype, value: float) -> None:
    """n/k = 100 times as much is beyond it; smaller ones are scaled as ever."""
    codec, x = random_k(0.01, unbiased=True), torch.full((1000,), value, dtype=dtype)
    x[::2] = -1.0
    residual, when = torch.zeros_like(x), EncodeContext(2)
    wire, _ = codec.encode_(x, residual, None, when)
    decoded = codec.decode(wire, x, when)
    assert set(decoded.unique().tolist()) == {-100.0, 0.0, float(torch.finfo(dtype).max)}
    assert torch.equal(residual, x - decoded)


def lost(codec: Codec, x: Tensor, times: int) -> tuple[float, float]:
    """‖x̂ - x‖² / ‖x‖², the mean over that many steps, and its standard error."""
    whens = [EncodeContext(step, rank=1, tensor=5) for step in range(1, times + 1)]
    found = [codec.decode(codec.encode(x, codec.init(x), when)[0], x, when).double() - x for when in whens]
    errors = torch.stack([each.square().sum() for each in found]) / x.double().square().sum()
    return float(errors.mean()), float(errors.std()) / math.sqrt(times)


@pytest.mark.parametrize(
    "codec",
    [*BOUNDED, *(terngrad(clip, seed=1) for clip in CLIPS)],
    ids=lambda codec: codec.facts.name,
)
@settings(max_examples=examples(12), derandomize=True)
@given(numel=st.integers(1, 300), seed=st.integers(0, 999), power=st.sampled_from([0, 1, 3, 9]))
def test_the_bound_of_what_conserves_only(codec: Codec, numel: int, seed: int, power: int) -> None:
    """E‖x̂ - x‖² ≤ bound · ‖x‖²: for equal elements, normal ones, and a few that are large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x = x.sign() * x.abs() ** power
    mean, standard_error = lost(codec, x, 30)
    assert mean <= codec.facts.law.bound(x) * (1 + 1e-6) + 5 * standard_error


@pytest.mark.parametrize("clip", CLIPS)
def test_the_bound_of_terngrad_is_that_of_its_worst_tensor(clip: float) -> None:
    """One large element and many of clip/4 standard deviations, or of one: nearly as much is lost as may be."""
    n, small = 100_000, min(clip / 4, 0.999)
    x = torch.full((n,), small)
    x[0] = math.sqrt(n * (1 - small**2) + small**2)
    codec = terngrad(clip)
    mean, standard_error = lost(codec, x, 3)
    assert codec.facts.law.bound(x) * 0.97 < mean < codec.facts.law.bound(x) + 5 * standard_error
    with pytest.raises(ValueError, match="may be larger than its input"):
        feedback(codec)
