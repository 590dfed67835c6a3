"""PCA of a tensor's rows: the best matrix of its rank, within its bound for all inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.compression import pca
from polytempo.core import Codec, NotFinite
from polytempo.jobs.digits import job as digits

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (8, 3, 3, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_pca_is_the_best_matrix_of_its_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The error is the sum of the squares of the singular values that are left out; never more than the bound."""
    x = normal(*shape).to(dtype) + 3
    codec = pca(rank=2)
    wire, _ = codec.encode(x)
    rows = x.double().flatten(1)
    assert wire.numel() * wire.element_size() == codec.wire_bytes(x) == 4 * (rows.shape[1] + 2 * sum(rows.shape))
    left_out = torch.linalg.svdvals(rows - rows.mean(dim=0))[2:].square().sum()
    error = (codec.decode(wire, x).double() - x.double()).square().sum()
    assert float(error) == pytest.approx(float(left_out), rel=1e-4)
    assert float(error) <= (1 - codec.facts.law.bound(x)) * float(rows.square().sum())
    assert torch.equal(wire, codec.encode(x.clone())[0])
    residual = torch.zeros_like(x)
    codec.encode_(x, residual)
    assert torch.equal(residual, x - codec.decode(wire, x))


def test_pca_finds_what_has_few_components() -> None:
    x = normal(50, 3) @ normal(3, 30, seed=1) + normal(30, seed=2)
    wire, _ = pca(rank=3).encode(x)
    assert torch.allclose(pca(rank=3).decode(wire, x), x, rtol=1e-4, atol=1e-5)
    same = torch.ones(30, 20)
    assert torch.equal(pca(rank=1).decode(pca(rank=1).encode(same)[0], same), same)


@pytest.mark.parametrize("x", [normal(30), normal(4, 4), normal(0, 5), torch.tensor(2.0)], ids=lambda x: str(x.shape))
def test_what_pca_would_not_make_smaller_travels_exactly(x: Tensor) -> None:
    codec = pca(rank=3)
    wire, _ = codec.encode(x)
    assert codec.wire_bytes(x) == 4 * x.numel()
    assert torch.equal(codec.decode(wire, x), x)
    assert codec.facts.law.bound(x) == 1.0


def test_pca_refuses() -> None:
    with pytest.raises(ValueError, match="rank"):
        pca(rank=0)
    x = normal(50, 40)
    with pytest.raises(ValueError, match="numbers"):
        pca(2).decode(pca(2).encode(x)[0][:-1], x)
    x[3, 1] = math.nan
    with pytest.raises(NotFinite, match="element 121"):
        pca(2).encode(x)


def error(codec: Any, x: Tensor) -> float:
    """‖x - x̂‖² / ‖x‖²."""
    wire, _ = codec.encode(x)
    assert wire.nbytes == codec.wire_bytes(x)
    return float((codec.decode(wire, x).double() - x.double()).square().sum() / x.double().square().sum())


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("rank", [2, 4, 8])
@pytest.mark.parametrize("repeats", [1, 16])
def test_pca_of_rows_that_are_zero_or_alike(num_rows: int, rank: int, repeats: int) -> None:
    """Few rows are something, or each is there 16 times: most eigenvalues are rounding noise, and show no direction."""
    for transposed in (False, True):
        x = torch.zeros(64, 400)
        if repeats > 1:
            x = normal(num_rows, 400, seed=rank).repeat(64 // num_rows + 1, 1)[:64]
        else:
            x[normal(64, seed=rank).argsort()[:num_rows]] = normal(num_rows, 400, seed=rank)
        x = x.T.contiguous() if transposed else x
        codec = pca(rank)
        assert error(codec, x) <= 1 - codec.facts.law.bound(x)
        if rank >= num_rows:
            assert error(codec, x) < 1e-12


def kept(codec: Codec, x: Tensor) -> int:
    return int(codec.encoding.num_components(x))  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(2, 100), (3, 100), (4, 64), (100, 3), (64, 4), (1, 50)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 100])
def test_pca_of_more_components_than_there_are(shape: tuple[int, int], rank: int) -> None:
    """Float64, which it halves even so; the law holds except for the rounding to float32."""
    for scale in (1.0, 1e-30, 1e30):
        x, codec = normal(*shape, seed=rank).double() * scale + scale, pca(rank)
        assert kept(codec, x) == max(1, min(rank, shape[0] - 1, shape[1]))
        assert error(codec, x) <= 1 - codec.facts.law.bound(x)
        assert 1 - codec.facts.law.bound(x) < 1e-12 or kept(codec, x) < min(shape[0] - 1, shape[1])


def test_pca_of_orthogonal_rows_has_no_more_error_than_it_may() -> None:
    """All eigenvalues are the same, so the bound is met with equality but for rounding."""
    for dtype in DTYPES:
        x = torch.zeros(64, 200, dtype=dtype)
        x[:32, :32] = torch.eye(32) * 3
        x[32:, :32] = -torch.eye(32) * 3
        assert error(pca(8), x) <= 1 - pca(8).facts.law.bound(x)


def test_pca_of_the_largest_numbers_is_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.finfo(dtype).max * (normal(64, 400) > 0).to(dtype)
        assert pca(2).decode(pca(2).encode(x)[0], x).isfinite().all()


# ------------------------------------------------------------------------------------------------- within an error


def falling(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix with singular values 1, 1/2, 1/4, …, and a mean."""
    k = min(rows, columns)
    left = torch.linalg.qr(normal(rows, k).double()).Q
    right = torch.linalg.qr(normal(columns, k, seed=1).double()).Q
    matrix: Tensor = left * 0.5 ** torch.arange(k).double() @ right.T + 0.01
    return matrix.to(dtype)


def components(wire: Tensor) -> int:
    return int(wire[:4].view(torch.int32))


@pytest.mark.parametrize("allowed", [0.3, 0.1, 0.01, 1e-3])
@pytest.mark.parametrize("shape", [(60, 40), (40, 60)], ids=str)
def test_pca_takes_the_fewest_components_within_the_error(allowed: float, shape: tuple[int, int]) -> None:
    x, codec = falling(*shape), pca(error=allowed)
    wire, _ = codec.encode(x)
    k, size = components(wire), float(x.double().norm())
    values = torch.linalg.svdvals(x.double() - x.double().mean(0))
    assert float(values[k:].norm()) <= allowed * size
    assert k == 0 or allowed * size < 1.01 * float(values[k - 1 :].norm())
    assert float((codec.decode(wire, x) - x).double().norm()) <= allowed * size
    assert wire.nbytes == 4 + 4 * (shape[1] + k * sum(shape)) < x.nbytes
    assert 1 - codec.facts.law.bound(x) == pytest.approx(allowed**2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(50, 30), (31, 17), (7,), (0, 4), (), (1, 9)], ids=str)
def test_the_tensor_travels_exactly_where_no_few_components_are_enough(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, codec = normal(*shape).to(dtype), pca(error=1e-9)
    wire, _ = codec.encode(x)
    assert components(wire) == -1
    assert 0 <= codec.wire_bytes(x) - 4 - x.nbytes < 4
    assert torch.equal(codec.decode(wire, x), x)


def test_equal_rows_are_their_mean_alone() -> None:
    for x in (torch.zeros(40, 30), normal(30).repeat(40, 1)):
        wire, _ = pca(error=0.1).encode(x)
        assert (components(wire), wire.nbytes) == (0, 4 + 4 * 30)
        torch.testing.assert_close(pca(error=0.1).decode(wire, x), x)


def test_pca_within_an_error_refuses() -> None:
    for wrong in (0, 1, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"error is a share of the norm|error must be"):
            pca(error=wrong)
    with pytest.raises(ValueError, match="a rank, or an error"):
        pca(2, 0.1)
    x = falling(50, 40)
    wire, _ = pca(error=0.1).encode(x)
    with pytest.raises(ValueError, match="bytes"):
        pca(error=0.1).decode(wire[:-4], x)
    wire[:4].view(torch.int32).fill_(77)
    with pytest.raises(ValueError, match="77 components"):
        pca(error=0.1).decode(wire, x)
    assert pca().facts.name == "pca(rank=4)"
    assert pca(error=0.1).facts.name == "pca(error=0.1)"


def test_a_server_takes_pca_within_an_error_of_three_tenths() -> None:
    strategy = pt.strategies.async_sgd(pull_codec=pca(error=0.3))
    assert pt.parse_strategy(strategy.name).name == strategy.name
    with pytest.raises(ValueError, match=r"may change the weights of a large tensor by 16\.0%"):
        pt.strategies.async_sgd(pull_codec=pca(error=0.4))
    with pytest.raises(ValueError, match=r"pca\(rank=4\) may change the weights .* finer one"):
        pt.strategies.async_sgd(pull_codec=pca(rank=4))


def few_directions() -> nn.Module:
    """Layers whose rows have three directions, so that PCA makes them smaller."""
    first = nn.Linear(64, 96)
    with torch.no_grad():
        first.weight.copy_(normal(96, 3) @ normal(3, 64, seed=1) / 30)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(96, 10))


def test_workers_pull_the_components_of_weights() -> None:
    """A finer bound is nearer to exact pulls, and a coarser one sends fewer bytes."""
    job = replace(digits, model=few_directions)
    results = [
        pt.simulate(job, pt.strategies.async_sgd(pull_codec=codec), workers=1, steps=5, seed=3)
        for codec in (None, pca(error=0.02), pca(error=0.3))
    ]
    exact, fine, coarse = results
    assert len({each.parameters_sha256 for each in results}) == 3
    sent = [each.server["bytes_sent"] for each in results if each.server is not None]
    assert sent[2] < 0.6 * sent[0]
    assert sent[2] < sent[1] < sent[0]
    assert exact.loss is not None
    assert fine.loss == pytest.approx(exact.loss, rel=0.1)
    assert coarse.loss == pytest.approx(exact.loss, rel=0.5)
