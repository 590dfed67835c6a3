"""Codecs of a code for every element: literal wires, and the laws that their docstrings prove."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polytempo.compression import bf16, bins, dynamic8, exact, feedback, fp16, int8, one_bit, sign
from polytempo.compression.codecs.dynamic8 import Tree, nearest, tree
from polytempo.core import Codec, EncodeContext, NotFinite
from polytempo.native.kernels import codes_dense
from some_cases import examples

CODECS: list[Codec] = [bf16(), fp16(), int8(), int8(5), dynamic8(), dynamic8(16), one_bit(), sign()]
CODECS += [sign(False), bins(), bins(3)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.facts.name)


def floats(wire: Tensor, count: int) -> list[float]:
    """The numbers that a wire begins with."""
    return wire[: 4 * count].view(torch.float32).tolist()


def test_int8_in_figures() -> None:
    x = torch.tensor([127.0, -63.5, 0.4, 2.5, 3.5, 254.0, 0.0])
    wire, _ = int8(block=5).encode(x)
    assert floats(wire, 2) == [1.0, 2.0]
    assert wire[8:].view(torch.int8).tolist() == [127, -64, 0, 2, 4, 127, 0, 0]
    assert int8(block=5).decode(wire, x).tolist() == [127, -64, 0, 2, 4, 254, 0]


def test_int8_of_what_has_no_scale() -> None:
    residual = torch.tensor([1e-37, -1e-45, 0.0])
    wire, _ = int8().encode_(torch.zeros(3), residual)
    assert wire.tolist() == [0] * 8
    assert torch.equal(residual, torch.tensor([1e-37, -1e-45, 0.0])), "all of it is residual"


def test_one_bit_in_figures() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, -4.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0, -6.0]])
    residual = torch.zeros(3, 5)
    wire, _ = one_bit().encode_(x, residual)
    means = torch.tensor([-3.0, 4 / 3, 0.0, 0.0, -2.0, 0.0])
    assert wire[:24].view(torch.float32).tolist() == means.tolist()
    assert wire[24:].view(torch.int32).tolist() == [0b10101, 0b11111, 0]
    assert torch.equal(residual, x - one_bit().decode(wire, x))
    assert residual[2].tolist() == [1, 1, 1, 1, -4]


def test_bins_in_figures() -> None:
    """The mean is 1 and the deviation √5, so that 2 bits have edges at -2.35, 1 and 4.35, and 3 bits at each 1.68."""
    x = torch.tensor([-2.0, 0.0, 2.0, 4.0]).repeat_interleave(4)
    wire, _ = bins().encode(x)
    assert floats(wire, 4) == [0.0, -1.0, 3.0, 0.0]
    assert wire[16:].view(torch.int32).tolist() == [0xAAAA5555 - 2**32]
    assert bins().decode(wire, x).tolist() == [-1.0] * 8 + [3.0] * 8
    wire, _ = bins(3).encode(x)
    assert floats(wire, 8) == [0.0, 0.0, -2.0, 0.0, 2.0, 4.0, 0.0, 0.0]
    assert torch.equal(bins(3).decode(wire, x), x)


def test_bins_of_what_is_far_or_does_not_differ() -> None:
    """One element beyond 3 σ has the outermost bin alone; equal and few elements are met exactly."""
    x = torch.zeros(100)
    x[7] = 5e37
    assert torch.equal(bins(3).decode(bins(3).encode(x)[0], x), x)
    for same in (torch.full((30, 2), -0.3), torch.zeros(50), torch.zeros(0, 4), torch.randn(5), torch.randn(7).half()):
        wire, _ = bins().encode(same)
        assert torch.equal(bins().decode(wire, same), same)
        assert wire.numel() == bins().wire_bytes(same) <= same.nbytes + 2


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ((), 12),
        ((0,), 0),
        ((0, 4), 0),
        ((33,), 16),
        ((2, 33), 32),
        ((100, 3), 8 + 40),
        ((100, 4), 1200),
        ((3, 2, 2), 36),
    ],
)
def test_rows_of_one_bit(shape: tuple[int, ...], num_bytes: int) -> None:
    """Rows of fewer than 4 would grow, and are one row."""
    x = torch.ones(shape)
    assert one_bit().wire_bytes(x) == one_bit().encode(x)[0].numel() == num_bytes
    assert torch.equal(one_bit().decode(one_bit().encode(x)[0], x), x)


def test_sign_in_figures() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, -5.0])
    scaled, _ = sign().encode(x)
    assert floats(scaled, 1) == [2.0]
    assert scaled[4:].tolist() == [0b0101, 0, 0, 0]
    assert sign().decode(scaled, x).tolist() == [2, -2, 2, -2]
    plain, _ = sign(scaled=False).encode(x)
    assert plain.tolist() == [0b0101, 0, 0, 0]
    assert sign(scaled=False).decode(plain, x).tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["kernels where there are", "torch"])
def test_the_sign_of_zero_is_a_matter_of_turns(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 where element + rank + step is odd, whichever sign the zero has; all others keep theirs, and so does x."""
    if way == "torch":
        monkeypatch.setattr(codes_dense, "available", lambda: False)
    codec, x = sign(scaled=False), torch.tensor([0.0, -0.0, 1e-7, -1e-7, 0.0, -0.0, 3.0] * 15, dtype=dtype)
    before = x.clone()
    for rank, step in ((0, 1), (1, 1), (0, 2), (5, 8), (2, 2**31)):
        when = EncodeContext(step, rank)
        wire, _ = codec.encode(x, None, when)
        decoded = codec.decode(wire, x, when)
        turns = [1.0 if (element + rank + step) % 2 else -1.0 for element in range(len(x))]
        assert decoded.tolist() == torch.where(x == 0, torch.tensor(turns, dtype=dtype), x.sign()).tolist()
        assert decoded[:7].tolist() == ([1, -1, 1, -1, 1, -1, 1] if (rank + step) % 2 else [-1, 1, 1, -1, -1, 1, 1])
        residual = x.clone()
        assert torch.equal(codec.encode_(torch.zeros_like(x), residual, None, when)[0], wire)
        assert torch.equal(residual, x - decoded)
    assert torch.equal(x, before)


def test_the_numbers_of_the_tree() -> None:
    """All distinct and ascending, alike on both sides of 0, a decade for each zero before the first 1."""
    numbers = Tree.of(tree()).numbers.double()
    assert len(numbers) == 256
    assert bool((numbers[1:] > numbers[:-1]).all())
    assert torch.equal(numbers[:127], -numbers[128:255].flip(0))
    assert numbers[[127, 255]].tolist() == [0, 1]
    for k in range(7):
        decade = numbers[127 + 2 ** (6 - k) : 127 + 2 ** (7 - k)] * 10.0**k
        assert 0.1 < decade.min() <= decade.max() < 1
        assert abs(float(decade.mean()) - 0.55) < 1e-6, "cells are equal"
    assert numbers[127 + 1].item() == pytest.approx(0.55e-6)
    assert numbers[127 + 0b1000000].item() == pytest.approx(0.1 + 0.9 / 128)


def test_the_nearest_number_is_found() -> None:
    numbers = Tree.of(tree()).numbers
    assert torch.equal(nearest(numbers, Tree.of(tree())), torch.arange(256, dtype=torch.int32))
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    around = torch.cat([middles * (1 - 1e-5), middles * (1 + 1e-5), 10.0 ** torch.linspace(-9, 0, 999).double()])
    t = torch.cat([around, -around]).clamp(-1, 1).float()
    found = nearest(t, Tree.of(tree()))
    best = (t[:, None].double() - numbers.double()).abs().argmin(1)
    assert torch.equal(found.long(), best)


def test_dynamic8_in_figures() -> None:
    x = torch.tensor([8.0, -8.0, 0.0, 8e-8, 4.0])
    wire, _ = dynamic8(block=4).encode(x)
    assert floats(wire, 2) == [8.0, 4.0]
    assert wire[8:].tolist() == [255, 0, 127, 127, 255, 0, 0, 0]
    assert dynamic8(block=4).decode(wire, x).tolist() == pytest.approx([8, -8 * (1 - 0.9 / 128), 0, 0, 4])


@pytest.mark.parametrize("make", [fp16, bf16])
@pytest.mark.parametrize("terms", [1, 2, 3, 7, 255, 1000])
def test_the_largest_numbers_of_all_ranks_have_a_finite_sum(make: type, terms: int) -> None:
    codec: Codec = make()
    for dtype in DTYPES[:3]:
        x = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
        wire, _ = codec.encode(x, when=EncodeContext(terms=terms))
        total = torch.zeros_like(wire)
        for _ in range(terms):
            total += wire
        assert total.isfinite().all()
    assert codec.encode(torch.tensor([math.inf, -math.inf]), when=EncodeContext(terms=terms))[0].isinf().all()


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from([(), (0,), (1,), (37,), (4, 33), (2, 3, 4), (9, 2)]))
def test_what_is_not_sent_is_the_residual(codec: Codec, dtype: torch.dtype, seed: int, shape: tuple[int, ...]) -> None:
    """The residual is v - decode(wire) to the bit, the loss is as declared, and add_ adds the decoded values."""
    generator = torch.Generator().manual_seed(seed)
    x, left = (torch.randn(shape, generator=generator).pow(3).to(dtype) for _ in range(2))
    before, residual, total = x.clone(), left.clone(), x + left
    wire, state = codec.encode_(x, residual)
    decoded = codec.decode(wire, x)
    assert state is None
    assert torch.equal(x, before)
    assert torch.equal(residual, total - decoded)
    assert wire.numel() * wire.element_size() == codec.wire_bytes(x)
    assert torch.equal(wire, codec.encode(total)[0])
    assert decoded.dtype is dtype
    assert decoded.shape == x.shape
    out = torch.ones_like(x)
    codec.add_(wire, out)
    assert torch.equal(out, decoded + 1)
    if codec.facts.law.kind == "contraction":
        lost = float((total.double() - decoded.double()).square().sum())
        below_the_range = (
            x.numel() * 2.0**-50 if codec.facts.name == "fp16()" else 1e-30
        )  # half of fp16's smallest number
        assert lost <= (1 - codec.facts.law.bound(x)) * float(total.double().square().sum()) + below_the_range


@pytest.mark.parametrize("codec", [int8(64), dynamic8(64), one_bit(), sign()], ids=lambda codec: codec.facts.name)
def test_the_worst_tensor_meets_the_bound(codec: Codec) -> None:
    """So the bound is as good as one of this kind can be."""
    middle = {"int8(block=64)": 1 / 254, "dynamic8(block=64)": 0.0}.get(codec.facts.name, 0.0)
    x = torch.full((64,), middle * 0.9999)
    x[0] = 1
    if codec.facts.name.startswith("dynamic8"):
        numbers = Tree.of(tree()).numbers
        candidates = (numbers[1:] + numbers[:-1]) / 2
        x = torch.where(torch.arange(64) == 0, -1.0, candidates[128:, None].expand(-1, 64))
    rows = x.view(-1, 64)
    lost = [float((r - codec.decode(codec.encode(r)[0], r)).square().sum() / r.square().sum()) for r in rows]
    assert max(lost) <= 1 - codec.facts.law.bound(rows[0])
    assert max(lost) == pytest.approx(1 - codec.facts.law.bound(rows[0]), rel=0.01)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_changes_where_something_is_no_number(codec: Codec, dtype: torch.dtype) -> None:
    x, residual = torch.ones(3, 40, dtype=dtype), torch.full((3, 40), 0.25, dtype=dtype)
    x[2, 1] = math.nan
    with pytest.raises(NotFinite, match="element 81 is nan"):
        codec.encode_(x, residual)
    assert bool((residual == 0.25).all())
    if codec.facts.law.kind == "contraction":
        with pytest.raises(NotFinite):
            feedback(codec).encode(x)


@every_codec
def test_strides_do_not_matter(codec: Codec) -> None:
    x = torch.linspace(-1, 2, 240).view(12, 20)
    wire, _ = codec.encode(x)
    columns = x.t().contiguous().t()
    assert torch.equal(codec.encode(columns)[0], wire)
    residual, plain = torch.zeros_like(columns), torch.zeros(12, 20)
    codec.encode_(columns, residual)
    codec.encode_(x, plain)
    assert torch.equal(residual, plain)
    out = torch.zeros(20, 12).t()
    codec.add_(wire, out)
    assert torch.equal(out, codec.decode(wire, x))


@every_codec
def test_a_wire_of_another_tensor_is_not_read_beyond_its_end(codec: Codec) -> None:
    wire, _ = codec.encode(torch.ones(8, 50))
    with pytest.raises(ValueError, match=r"here is room for|has \d+ elements"):
        codec.add_(wire, torch.zeros(8, 90))


@every_codec
@pytest.mark.parametrize("left", [0, 1, 3, 4, 5, 7])
def test_a_truncated_wire_is_refused_by_its_length(codec: Codec, left: int) -> None:
    """The reading as parts does not matter; nothing is added."""
    x, out = torch.ones(8, 50), torch.ones(8, 50)
    wire = codec.encode(x)[0][:left]
    for decode in (lambda: codec.decode(wire, x), lambda: codec.add_(wire, out)):
        with pytest.raises(ValueError, match="a wire of"):
            decode()
    assert bool((out == 1).all())


@pytest.mark.parametrize("codec", [*CODECS, exact()], ids=lambda codec: codec.facts.name)
def test_memory_that_a_kernel_could_not_use_is_refused(codec: Codec) -> None:
    """Too little, strided, of another dtype or with two dimensions: to write to, and to read."""
    x, left = torch.linspace(-1, 1, 400), torch.full((400,), 0.5)
    wire, _ = codec.encode(x)
    memory, out, n = torch.zeros(8 * wire.nbytes, dtype=torch.uint8).view(wire.dtype), torch.ones(400), wire.numel()
    other = torch.zeros(n, dtype=torch.float64)
    for room in (memory[: n - 4], memory[: 2 * n : 2], other, memory[:n].view(-1, 1), memory[:n].to("meta")):
        with pytest.raises(ValueError, match=f"a wire of {re.escape(codec.facts.name)}"):
            codec.encode(x, out=room)
        with pytest.raises(ValueError, match=f"a wire of {re.escape(codec.facts.name)}"):
            codec.encode_(x, left, out=room)
        for decode in (lambda wrong: codec.decode(wrong, x), lambda wrong: codec.add_(wrong, out)):
            with pytest.raises(ValueError, match="a wire of"):
                decode(room)
    assert not memory.view(torch.uint8).any()
    assert bool((left == 0.5).all())
    assert bool((out == 1).all())
    found, _ = codec.encode(x, out=memory)
    assert torch.equal(found, wire)
    assert not memory[n:].view(torch.uint8).any()


@every_codec
def test_a_residual_of_another_shape_meets_no_kernel(codec: Codec) -> None:
    x, residual = torch.ones(1000), torch.zeros(10)
    assert not codes_dense.fits(x, residual)
    with pytest.raises((RuntimeError, ValueError)):
        codec.encode_(x, residual)


@pytest.mark.parametrize("codec", [*CODECS, exact()], ids=lambda codec: codec.facts.name)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_what_wants_a_gradient_is_encoded_without_one(codec: Codec, dtype: torch.dtype) -> None:
    x, residual = torch.ones(40, dtype=dtype, requires_grad=True), torch.zeros(40, dtype=dtype)
    assert not codec.encode(x)[0].requires_grad
    assert not codec.encode_(x, residual)[0].requires_grad
    assert not residual.requires_grad


@pytest.mark.parametrize("terms", [1, 2, 7])
def test_16_bit_tensors_stay_finite_in_the_other_16_bits(terms: int) -> None:
    """bf16 holds no limit of fp16, and rounds it up: 65504 would be 65536, and infinite."""
    when = EncodeContext(terms=terms)
    wide, residual = torch.tensor([1e6, -1e6, 1.0], dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    wire, _ = fp16().encode_(wide, residual, when=when)
    assert torch.stack([wire] * terms).sum(0).isfinite().all()
    assert residual.isfinite().all()
    assert torch.equal(wire, fp16().encode(wide.float(), when=when)[0])
    most = torch.tensor([65504.0, -65504.0, math.inf], dtype=torch.float16)
    wire, _ = bf16().encode(most)
    assert bf16().decode(wire, most).tolist() == most.tolist()
    out = torch.zeros_like(most)
    bf16().add_(wire, out)
    assert out.tolist() == most.tolist()
    rest = torch.zeros(2, dtype=torch.float16)
    bf16().encode_(most[:2], rest)
    assert rest.tolist() == [0, 0]


@pytest.mark.parametrize("make", [int8, dynamic8])
def test_a_block_has_elements(make: type) -> None:
    with pytest.raises(ValueError, match="block must be a number of elements >= 1, got 0"):
        make(block=0)


def test_names_are_as_a_person_would_write_them() -> None:
    assert [codec.facts.name for codec in CODECS[3:]] == [
        "int8(block=5)",
        "dynamic8(block=4096)",
        "dynamic8(block=16)",
        "one_bit()",
        "sign(scaled=True)",
        "sign(scaled=False)",
        "bins(bits=2)",
        "bins(bits=3)",
    ]
