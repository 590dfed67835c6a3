"""Codecs that draw: unbiased, within their bounds, exact with their residual, the same wherever they run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polytempo.compression import natural, pca, qsgd, terngrad
from polytempo.compression.encoding.draw import draw_key, draws
from polytempo.core import EncodeContext, NotFinite
from polytempo.native.kernels import codes_dense

CPU = torch.device("cpu")
DRAWN = (qsgd(), qsgd(levels=1, bucket=7), qsgd(levels=127, bucket=100), terngrad(), terngrad(clip=None), natural())
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EXTREMES = (0.0, -0.0, 1e-45, -3e-42, 1.1754944e-38, 3.4028235e38, -3.4028235e38)

codecs = pytest.mark.parametrize("codec", DRAWN, ids=lambda codec: codec.facts.name)


@pytest.fixture(params=["kernels where there are", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(codes_dense, "available", lambda: False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# A drawn codec's promises.


@codecs
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 7), (4099,), (2, 1024, 3)], ids=str)
def test_wires_have_the_bytes_that_were_said(way: None, codec: Any, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    room = torch.full((codec.wire_bytes(x) + 8,), 0xA5, dtype=torch.uint8).view(codec.wire_dtype(x))
    wire, _ = codec.encode(x, out=room)
    alone, _ = codec.encode(x)
    assert wire.numel() * wire.element_size() == codec.wire_bytes(x) == alone.numel() * alone.element_size()
    assert codec.wire_bytes(x) % 4 == 0
    assert wire.numel() == 0 or wire.data_ptr() == room.data_ptr()
    assert torch.equal(wire, alone)
    assert (room.view(torch.uint8)[codec.wire_bytes(x) :] == 0xA5).all()
    assert codec.decode(wire, x).shape == x.shape


def test_how_many_bytes() -> None:
    like = torch.empty(1_000_000)
    table = {
        qsgd(4, 512): 4 * 1954 + 500_000,
        qsgd(1, 512): 4 * 1954 + 250_000,
        qsgd(127, 10**9): 4 + 1_000_000,
        qsgd(2, 512): 4 * 1954 + 375_000,
        terngrad(): 4 + 250_000,
        natural(): 1_000_000 + 125_000,
    }
    assert {codec.facts.name: codec.wire_bytes(like) for codec in table} == {c.facts.name: n for c, n in table.items()}
    # 16 words hold a block of 160 codes of 3 bits, 128 of 4, 96 of 5; the rest takes as few as it needs.
    assert [terngrad().wire_bytes(like, terms) for terms in (3, 7, 15)] == [400_000, 500_000, 4 * 166_667]


@codecs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_what_was_not_sent(way: None, codec: Any, dtype: torch.dtype) -> None:
    x, residual = normal(3, 700).to(dtype), normal(3, 700, seed=1).to(dtype)
    v = x + residual
    kept = x.clone()
    wire, _ = codec.encode_(x, residual, None, EncodeContext(3, 1, 9))
    assert torch.equal(x, kept)
    assert torch.equal(wire, codec.encode(v, None, EncodeContext(3, 1, 9))[0])
    assert torch.equal(residual, v - codec.decode(wire, v))
    out = normal(3, 700, seed=2).to(dtype)
    expected = out + codec.decode(wire, v)
    codec.add_(wire, out)
    assert torch.equal(out, expected)


@codecs
def test_views_that_do_not_lie_in_one_piece(codec: Any) -> None:
    x = normal(40, 30).T
    residual = normal(40, 30, seed=1).T
    out = normal(40, 30, seed=2).T
    together = x + residual
    wire, _ = codec.encode_(x, residual)
    assert torch.equal(wire, codec.encode(together.contiguous())[0])
    assert torch.equal(residual, together - codec.decode(wire, together))
    expected = out + codec.decode(wire, out)
    codec.add_(wire, out)
    assert torch.equal(out, expected)


@codecs
def test_extremes_stay_finite(way: None, codec: Any) -> None:
    for values in (EXTREMES, (0.0,) * 5, (1e-45,) * 3, (-7.0,)):
        x, residual = torch.tensor(values), torch.zeros(len(values))
        wire, _ = codec.encode_(x, residual)
        decoded = codec.decode(wire, x)
        assert decoded.isfinite().all()
        assert torch.equal(residual, x - decoded)
        assert (decoded[x == 0] == 0).all()
    half = torch.full((600,), 60000.0, dtype=torch.float16)
    assert codec.decode(codec.encode(half)[0], half).isfinite().all()


@codecs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_before_anything_changes(way: None, codec: Any, bad: float) -> None:
    x, residual = normal(5000), normal(5000, seed=1)
    x[4321] = bad
    kept = residual.clone()
    with pytest.raises(NotFinite, match="element 4321"):
        codec.encode(x)
    with pytest.raises(NotFinite, match="element 4321"):
        codec.encode_(x, residual)
    assert torch.equal(residual, kept)
    with pytest.raises(NotFinite, match=r"element 1 is 1e\+300"):
        codec.encode(torch.tensor([1.0, 1e300], dtype=torch.float64))


@codecs
def test_a_wire_that_is_too_short_is_refused(codec: Any) -> None:
    x = normal(100)
    wire, _ = codec.encode(x)
    with pytest.raises(ValueError, match="100 elements"):
        codec.decode(wire[:-1], x)
    with pytest.raises(ValueError, match="100 elements"):
        codec.add_(wire[:-1], x)
    with pytest.raises(ValueError, match="100 elements"):
        codec.encode(x, out=wire[:-1])


@codecs
def test_the_same_occasion_draws_the_same(codec: Any) -> None:
    x = normal(2000)
    when = EncodeContext(7, 1, 3)
    wires = [codec.encode(x, None, other)[0] for other in (when, when._replace(step=8), when._replace(rank=2))]
    assert torch.equal(codec.encode(x, None, when)[0], wires[0])
    assert not torch.equal(wires[0], wires[1])
    assert not torch.equal(wires[0], wires[2])


def test_kernels_and_torch_write_the_same_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of whole numbers are exact in float64, in any order; so here even steps and scalers are the same."""
    x = (normal(10_000) * 100).round()
    whens = (EncodeContext(2, 1, 5), EncodeContext(2, 1, 5, terms=5, agreed=1000.0))
    cases = [(codec, when) for codec in DRAWN for when in (whens if codec.facts.summable else whens[:1])]
    first = [codec.encode(x, None, when)[0] for codec, when in cases]
    monkeypatch.setattr(codes_dense, "available", lambda: False)
    for (codec, when), wire in zip(cases, first, strict=True):
        assert torch.equal(codec.encode(x, None, when)[0], wire), codec.facts.name


@pytest.mark.parametrize(
    "codec", [qsgd(4), qsgd(3, 16), qsgd(100), terngrad(None), natural()], ids=lambda c: c.facts.name
)
def test_unbiased_and_within_the_bound(codec: Any) -> None:
    """|mean - v| < 4 standard errors over 2,000 draws, and E‖x̂ - v‖² ≤ bound · ‖v‖²."""
    v = normal(48, seed=11)
    v[:4] = torch.tensor([0.0, 1e-3, 3.0, -4.0])
    drawn = torch.stack(
        [codec.decode(codec.encode(v, None, EncodeContext(step))[0], v) for step in range(1, 2001)]
    ).double()
    assert_mean(drawn, v.double())
    error = (drawn - v.double()).square().sum(dim=1).mean()
    assert float(error) <= 1.02 * codec.facts.law.bound(v) * float(v.double().square().sum())
    assert codec.facts.law.kind == "unbiased"


def assert_mean(drawn: Tensor, v: Tensor) -> None:
    standard_error = drawn.std(dim=0) / math.sqrt(len(drawn))
    assert ((drawn.mean(dim=0) - v).abs() <= 4 * standard_error + 1e-6 * v.abs()).all()


def test_bounds_are_reached() -> None:
    """Vectors with nearly the largest allowed error: the bounds are tight."""
    n = 64
    peak = torch.full((n,), 1 / (math.sqrt(n) + 1))
    peak[0] = 1.0
    for codec, v in ((terngrad(None), peak), (natural(), torch.full((n,), 4 / 3))):
        errors = [
            (codec.decode(codec.encode(v, None, EncodeContext(step))[0], v) - v).square().sum()
            for step in range(1, 501)
        ]
        ratio = float(torch.stack(errors).mean() / v.square().sum()) / codec.facts.law.bound(v)
        assert 0.93 < ratio < 1.07, codec.facts.name


# QSGD.


def test_qsgd_agrees_with_the_public_example() -> None:
    """`XJiaoLEE/PPGC`, train/QSGD.py: level_float = d |x| / ‖x‖, one more where a uniform number is below the rest."""
    x = torch.tensor([0, 1, 0.5, 0.2, -0.3, -0.9])
    for levels in (1, 2, 5):
        for step in range(1, 11):
            when = EncodeContext(step)
            norm = x.double().norm()
            level_float = levels * x.double().abs() / norm
            uniform = (draws(draw_key(0, when), 6, CPU) >> 2).double() / 2**30
            level = level_float.floor() + (uniform < level_float - level_float.floor())
            codec = qsgd(levels=levels, bucket=6)
            found = codec.decode(codec.encode(x, None, when)[0], x)
            assert torch.allclose(found.double(), x.double().sign() * norm * level / levels, rtol=1e-6, atol=0)


def test_qsgd_on_its_levels_is_exact() -> None:
    """Norm 5, and values on levels of 5 / 5: nothing is left to chance, in each bucket and in the short last one."""
    x = torch.tensor([3.0, -4.0, 0.0, 5.0, -5.0])
    codec = qsgd(levels=5, bucket=2)
    wire, _ = codec.encode(x)
    assert wire[:12].view(torch.float32).tolist() == [1.0, 1.0, 1.0]
    assert wire[12:].view(torch.int32).tolist() == [8 | 1 << 4 | 5 << 8 | 10 << 12 | 0 << 16]
    assert torch.equal(codec.decode(wire, x), x)


@pytest.mark.parametrize(("levels", "bucket"), [(0, 512), (32768, 512), (4, 0)])
def test_qsgd_refuses(levels: int, bucket: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        qsgd(levels, bucket)


# TernGrad.


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 100])
def test_the_sum_of_wires_is_the_sum_of_ternaries(way: None, num_ranks: int) -> None:
    codec = terngrad()
    xs = [normal(1000, seed=rank) / num_ranks for rank in range(num_ranks)]
    agreed = max(codec.statistic(x, None) or 0.0 for x in xs)
    total, expected, left = torch.zeros(0), torch.zeros(1000, dtype=torch.float64), torch.zeros(1000)
    for rank, x in enumerate(xs):
        when = EncodeContext(1, rank, 5, num_ranks, agreed)
        residual = torch.zeros(1000)
        wire, _ = codec.encode_(x, residual, None, when)
        assert wire.dtype == torch.int32
        assert torch.equal(wire, codec.encode(x, None, when)[0])
        ternary = ((x - residual) / agreed).double().round()
        assert ternary.abs().max() <= 1
        expected += ternary
        left += residual
        total = wire if rank == 0 or num_ranks == 1 else total + wire
    when = EncodeContext(1, 0, 5, num_ranks, agreed)
    decoded = codec.decode(total, torch.empty(1000), when)
    assert torch.equal(decoded, expected.float() * agreed)
    assert torch.allclose(decoded + left, torch.stack(xs).sum(dim=0), rtol=1e-5, atol=1e-5)


def test_all_lanes_full_do_not_overflow() -> None:
    for terms in (2, 3, 7, 15, 127):
        for sign in (-1.0, 1.0):
            x = torch.full((700,), sign)
            when = EncodeContext(terms=terms, agreed=1.0)
            wire, _ = terngrad().encode(x, None, when)
            total = torch.stack([wire] * terms).sum(dim=0, dtype=torch.int32)
            assert torch.equal(terngrad().decode(total, x, when), x * terms)


def test_clipping_is_at_so_many_standard_deviations() -> None:
    x = torch.zeros(100)
    x[:2] = torch.tensor([10.0, -1.0])
    sigma = math.sqrt(101 / 100)
    assert terngrad(2.5).statistic(x, None) == pytest.approx(2.5 * sigma)
    assert terngrad(None).statistic(x, None) == terngrad(0.0).statistic(x, None) == 10.0
    drawn = torch.stack(
        [terngrad(2.5).decode(terngrad(2.5).encode(x, None, EncodeContext(step))[0], x) for step in range(1, 501)]
    )
    assert_mean(drawn.double(), x.clamp(-2.5 * sigma, 2.5 * sigma).double())
    same = torch.full((9,), 3.0)
    assert torch.equal(terngrad().decode(terngrad().encode(same)[0], same), same)


def test_clipping_a_gaussian_changes_length_and_direction_as_terngrads_authors_say() -> None:
    """1 to 1.5 % of the length, and 2 to 3 degrees."""
    x = normal(1_000_000, seed=1).double()
    bound = terngrad(2.5).statistic(x, None)
    clipped = x.clamp(-bound, bound)
    degrees = math.degrees(math.acos(float(x @ clipped / (x.norm() * clipped.norm()))))
    assert 1 - float(clipped.norm() / x.norm()) == pytest.approx(0.0114, rel=0.02)
    assert degrees == pytest.approx(2.75, rel=0.02)


def test_terngrad_refuses() -> None:
    x = normal(5)
    wire, _ = terngrad().encode(x, None, EncodeContext(terms=2, agreed=3.0))
    with pytest.raises(ValueError, match="all_gather"):
        terngrad().encode(x, None, EncodeContext(terms=2))
    with pytest.raises(ValueError, match="agreed"):
        terngrad().decode(wire, x, EncodeContext(terms=2))
    with pytest.raises(ValueError, match="clip"):
        terngrad(clip=-1.0)
    with pytest.raises(NotFinite):
        terngrad().statistic(torch.tensor([math.nan]), None)


# Natural compression.


def test_natural_leaves_powers_and_takes_neighbours() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 2.0**-126, -(2.0**127), 3.0, -0.7, 2.0**-127, 3e38])
    neighbours = [{1.0}, {-2.0}, {0.0}, {2.0**-126}, {-(2.0**127)}, {2.0, 4.0}, {-0.5, -1.0}, {0.0, 2.0**-126}]
    seen = [natural().decode(natural().encode(x, None, EncodeContext(step))[0], x).tolist() for step in range(1, 60)]
    assert [set(column) for column in zip(*seen, strict=True)] == [*neighbours, {2.0**127}]


def test_natural_denormals_are_unbiased() -> None:
    x = torch.full((4000,), 2.0**-128)
    decoded = natural().decode(natural().encode(x)[0], x)
    rate = float((decoded != 0).double().mean())
    assert abs(rate - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)


@pytest.mark.parametrize("codec", [qsgd(), pca(2)], ids=lambda codec: codec.facts.name)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_only_fitting_memory_is_taken_and_gradients_stay_out(codec: Any, dtype: torch.dtype) -> None:
    x, residual = normal(40, 30).to(dtype).requires_grad_(), torch.zeros(40, 30, dtype=dtype)
    wire, _ = codec.encode(x)
    assert not wire.requires_grad
    memory = torch.zeros(2 * wire.nbytes, dtype=torch.uint8).view(wire.dtype)
    for wrong in (memory[::2], memory[: wire.numel() - 4], wire.to(torch.float16), wire.view(-1, 1), wire.to("meta")):
        for use in (lambda w: codec.encode(x, out=w), lambda w: codec.decode(w, x), lambda w: codec.add_(w, residual)):
            with pytest.raises(ValueError, match="a wire of"):
                use(wrong)
    codec.encode_(x, residual)
    assert not residual.requires_grad


def test_qsgd_of_the_largest_16_bit_numbers_is_finite(way: None) -> None:
    """The step is rounded up, so a level may be beyond the type's last number."""
    for dtype, most in ((torch.bfloat16, 3.3e38), (torch.float16, 6e4)):
        x, residual = torch.zeros(512, dtype=dtype), torch.zeros(512, dtype=dtype)
        x[:4] = most
        wire, _ = qsgd(1, 512).encode_(x, residual)
        assert qsgd(1, 512).decode(wire, x).isfinite().all()
        assert residual.isfinite().all()


@codecs
def test_with_a_residual_nothing_is_lost(codec: Any) -> None:
    given, arrived, residual = torch.zeros(3, 300, dtype=torch.float64)
    for step in range(1, 21):
        x = normal(300, seed=step).double()
        wire, _ = codec.encode_(x, residual, None, EncodeContext(step))
        given += x
        codec.add_(wire, arrived, EncodeContext(step))
    assert torch.allclose(arrived + residual, given, rtol=0, atol=1e-6)
