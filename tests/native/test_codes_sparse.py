"""The kernels of sparse codecs against their twins in torch: same wires and residuals to the bit, on every machine."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from native.kernels import Buffer, assert_same_bits, by_torch, library
from polytempo import compression as c
from polytempo.compression.codecs.chunk_top_k import largest_by_sorting
from polytempo.compression.encoding import entries
from polytempo.core import Codec, EncodeContext, NotFinite
from polytempo.native.kernels import codes_sparse
from polytempo.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no native core here")
SAMPLED = 4 * 65536 + 77  # from 4 samples' length on the kernel of top-k guesses a threshold first


def drawn(n: int, seed: int) -> Tensor:
    """Normal values, with zeros of both signs, equal ones, and the smallest and largest there are."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    special = torch.tensor([0.0, -0.0, 0.5, -0.5, 1e-45, -1e-45, 1.0, 1.0, -1.0, 1e38, -1e38, 1e-38])
    values[: min(n, 12)] = special[: min(n, 12)]
    return values[torch.randperm(n, generator=torch.Generator().manual_seed(seed))] if n else values


CODECS: list[Codec] = [
    c.threshold(0.5),
    c.threshold(2.5),
    c.threshold(1e-45 * 2**20),
    c.top_k(0.01),
    c.top_k(0.4),
    c.top_k(1.0),
    c.prune(0.9),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.facts.name)
def test_wires_and_residuals_are_those_of_torch(isa: str, codec: Codec) -> None:
    for n in (1, 15, 16, 63, 64, 65, 4097, 10_000):
        x, residual = drawn(n, n), drawn(n, n + 1)

        def both(codec: Codec, x: Tensor = x, residual: Tensor = residual) -> tuple[Tensor, ...]:
            kept, out = residual.clone(), torch.full_like(x, 0.25)
            fed, alone = codec.encode_(x, kept)[0], codec.encode(x)[0]
            codec.add_(fed, out)
            return fed, alone, kept, out

        for found, wanted in zip(both(codec), both(by_torch(codec)), strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("kind", ["normal", "equal", "zero", "few", "periodic"])
def test_the_k_largest_whatever_the_sample_says(isa: str, kind: str) -> None:
    x = drawn(SAMPLED, 3)
    if kind == "equal":
        x = torch.where(x > 0, 1.0, -1.0)
    if kind == "zero":
        x.zero_()
    if kind == "few":
        x[x.abs() < 4] = 0
    if kind == "periodic":
        x[::5] = x[::5].clamp(-9, 9) * 1000
    for k in (1, 700, SAMPLED // 3, SAMPLED) if kind == "normal" else (700, SAMPLED // 3):
        wire = torch.empty(8 * k, dtype=torch.uint8)
        assert codes_sparse.SourceArrays(x).top(k, wire).bad == -1
        indices = entries.taken(wire, 0, k, torch.int32).long()
        assert torch.equal(indices, entries.largest(x, k))
        assert_same_bits(entries.taken(wire, 4 * k, k, torch.float32), x[indices])


@pytest.mark.parametrize("kind", ["normal", "equal", "zero", "few"])
def test_the_k_largest_of_each_chunk(kind: str) -> None:
    for num_chunks, size, shares in ((5, 4096, (1, 64, 4095, 4096)), (1, 63, (1, 62)), (3, 1, (1,)), (0, 4096, (64,))):
        values = drawn(num_chunks * size, 5).view(num_chunks, size)
        if kind == "equal":
            values = torch.where(values > 0, 1.0, -1.0)
        if kind == "zero":
            values = torch.zeros_like(values)
        if kind == "few":
            values = torch.where(values.abs() < 2, 0.0, values)
        for k in shares:
            found, expected = codes_sparse.chunk_top(values, k), largest_by_sorting(values, k)
            assert torch.equal(found[0], expected[0])
            assert_same_bits(found[1], expected[1])


@pytest.mark.parametrize("bits", [None, 2])
def test_wires_of_chunks_are_those_of_sorting(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, codec = drawn(9000, 7).to(dtype).clamp(-1e30, 1e30), c.feedback(c.chunk_top_k(bits=bits), 0.9)
        by_kernel = codec.encode(x)
        with monkeypatch.context() as patch:
            patch.setattr(codes_sparse, "serves", lambda *tensors: False)
            by_sorting = codec.encode(x)
        assert_same_bits(by_kernel[0], by_sorting[0])
        assert_same_bits(by_kernel[1].memory.residual, by_sorting[1].memory.residual)


def test_at_any_address(isa: str) -> None:
    n, k = 331, 40
    for offset in (0, 1, 4, 7):
        x, residual = Buffer(drawn(n, 1), offset), Buffer(drawn(n, 2), offset + 1)
        indices = Buffer(torch.zeros(k, dtype=torch.int32), offset)
        values, bad = Buffer(torch.zeros(k), offset), torch.zeros(1, dtype=torch.int64)
        source = codes_sparse._Source(x.pointer, residual.pointer, None, 0, 1)
        address = ctypes.byref(source)
        scratch = Buffer(torch.zeros(2 * k, dtype=torch.int32), offset)
        library().pt_sparse_top(address, n, k, indices.pointer, values.pointer, scratch.pointer, k, bad.data_ptr())
        v = x.like + residual.like
        assert torch.equal(indices.values().long(), entries.largest(v, k))
        words, expected = Buffer(torch.zeros((n + 15) // 16, dtype=torch.int32), offset), c.threshold(0.5)
        library().pt_threshold_pack(x.pointer, residual.pointer, 0.5, n, 1, words.pointer)
        wire, _ = expected.encode(v)
        assert_same_bits(words.values().view(torch.uint8), wire[8:])
        out = Buffer(torch.zeros(n), offset + 2)
        assert library().pt_threshold_add(out.pointer, n, words.pointer, (n + 15) // 16, 0.5, 1) == 0
        assert_same_bits(out.values(), expected.decode(wire, v))
        assert_same_bits(residual.values(), v - out.values())
        assert library().pt_sparse_add(out.pointer, n, indices.pointer, values.pointer, k) == 0
        library().pt_sparse_zero(out.pointer, indices.pointer, k)
        assert not out.values()[entries.largest(v, k)].any()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("codec", [c.threshold(0.5), c.top_k(0.01), c.dgc(0.01)], ids=lambda codec: codec.facts.name)
def test_the_first_that_is_no_number_is_named(isa: str, codec: Codec, bad: float) -> None:
    for n, index in ((SAMPLED, SAMPLED - 2), (5000, 4097), (5000, 0)):
        x = drawn(n, 1)
        x[index] = bad
        x[-1] = bad
        with pytest.raises(NotFinite, match=f"element {index} "):
            codec.encode(x)


@pytest.mark.parametrize("codec", [c.threshold(0.5), c.top_k(0.01)], ids=lambda codec: codec.facts.name)
def test_a_sum_that_is_no_number_is_refused(isa: str, codec: Codec) -> None:
    x, residual = torch.zeros(2000), torch.zeros(2000)
    x[7] = residual[7] = 3e38
    before = residual.clone()
    with pytest.raises(NotFinite, match="element 7 is inf"):
        codec.encode_(x, residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("n", [2000, 40_000])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_dgc_is_that_of_torch(isa: str, n: int, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = c.dgc(0.01, 0.9, clip)

    def run() -> list[Tensor]:
        state, found = None, []
        for step in range(1, 6):
            x = drawn(n, step).clamp(-100, 100)
            if step == 4:
                x[:] = 0.125  # so many alike that the sample's threshold finds too many, or hardly any
            wire, state = codec.encode(x, state, EncodeContext(step, 0, 5))
            found += [wire, state.u.residual.clone(), state.v.residual.clone(), codec.decode(wire, x)]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(codes_sparse, "serves", lambda *tensors: False)
        expected = run()
    for found, wanted in zip(run(), expected, strict=True):
        assert_same_bits(found, wanted)


def test_nothing_is_written_beyond_a_tensor() -> None:
    out = Buffer(torch.zeros(20), 0)
    indices, values = torch.tensor([3, 20], dtype=torch.int32), torch.ones(2)
    assert library().pt_sparse_add(out.pointer, 20, indices.data_ptr(), values.data_ptr(), 2) == 1
    indices[1] = -1
    assert library().pt_sparse_add(out.pointer, 20, indices.data_ptr(), values.data_ptr(), 2) == 1
    words = torch.tensor([3, 20], dtype=torch.int32)
    assert library().pt_threshold_add(out.pointer, 20, words.data_ptr(), 2, 1.0, 0) == 1
    for word in (1 << 4, 1 << 20, 1 << 31):  # of 20 elements the second word has 4
        words = torch.tensor([1, word - 2**32 * (word >= 2**31)], dtype=torch.int32)
        assert library().pt_threshold_add(out.pointer, 20, words.data_ptr(), 2, 1.0, 1) == 1
        assert library().pt_threshold_add(out.pointer, 20, words.data_ptr(), 1, 1.0, 1) == 1, "a word is missing"
    words = torch.tensor([1 | 1 << 16, 0], dtype=torch.int32)
    assert library().pt_threshold_add(out.pointer, 20, words.data_ptr(), 2, 1.0, 1) == 1, "up and down at once"
    assert not out.values().any()
