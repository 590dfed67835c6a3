"""Every codec of the catalogue obeys these laws.

The tensors are drawn by hypothesis: a shape, a kind of values, a seed, a dtype, and where in memory they begin.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laws.codec_cases import (
    MODERATE,
    NORMAL,
    TOLERANCE,
    Case,
    cases,
    every_codec,
    guarded,
    largest,
    raw,
    residuals,
    some,
    tensors_of,
    untouched,
    with_encode_,
)
from laws.codecs import ROWS, Row, text
from polytempo import compression
from polytempo.compression.encoding.feedback import Feedback, feedback
from polytempo.core import Codec, EncodeContext
from polytempo.spec.text.catalogue import CODECS

# ---------------------------------------------------------------------- the catalogue


def test_every_codec_has_a_row() -> None:
    """All that the command line can name; `feedback` goes around one."""
    wrong = {row.text.partition("(")[0] for row in ROWS} ^ (set(CODECS) - {"feedback"})
    assert not wrong, f"give tests/laws/codecs.py a row for {sorted(wrong)} (CONTRIBUTING.md, Adding a part)"


@every_codec
def test_a_codec_says_what_its_row_says(row: Row) -> None:
    codec = row.make()
    said = (
        codec.facts.law.kind,
        codec.facts.summable,
        codec.facts.sparse,
        codec.facts.fixed,
        codec.facts.passes_nonfinite,
        codec.facts.draws,
    )
    assert said == (row.law, row.summable, row.sparse, row.fixed, row.passes, row.draws)
    assert (codec.facts.memory == "own") == row.feeds_itself
    assert codec.facts.name.partition("(")[0] == row.text.partition("(")[0]
    assert codec.facts.flops > 0
    assert hash(codec) == hash(row.make()), "a codec is a value"
    assert codec == row.make()


# ---------------------------------------------------------------------- wires


@every_codec
@some
@given(case=cases(), context=st.tuples(st.integers(1, 2**31), st.integers(0, 4095), st.integers(0, 2**32 - 1)))
def test_a_wire_is_a_pure_function_and_as_long_as_said(row: Row, case: Case, context: tuple[int, int, int]) -> None:
    """The memory's earlier content does not matter; nothing beyond the memory is touched, and x stays unchanged."""
    codec, x, when = row.make(), case.tensor(), EncodeContext(*context)
    before, found = raw(x.reshape(-1)), []
    dtype = codec.wire_dtype(x)
    for filled in (0x00, 0xFF):
        memory, out = guarded(codec.wire_bytes(x), filled, dtype)
        wire, _ = codec.encode(x, codec.init(x), when, out)
        assert untouched(memory, filled)
        assert wire.numel() == 0 or wire.data_ptr() == out.data_ptr()
        found.append(raw(wire))
    wire, _ = codec.encode(x, codec.init(x), when)
    assert found == [raw(wire)] * 2
    assert wire.dim() == 1
    assert wire.dtype is dtype
    assert dtype is not torch.uint8 or wire.numel() % 4 == 0
    assert len(raw(wire)) == codec.wire_bytes(x) if row.fixed else len(raw(wire)) <= codec.wire_bytes(x)
    assert raw(x.reshape(-1)) == before


@every_codec
@some
@given(case=cases())
def test_both_ways_to_decode_agree(row: Row, case: Case) -> None:
    """decode = zeros + add_, in memory of its own, shaped like x; and whoever decodes gets the same."""
    codec, x = row.make(), case.tensor()
    when = EncodeContext(5, rank=3, tensor=7)
    wire, _ = codec.encode(x, codec.init(x), when)
    before = raw(wire)
    decoded = codec.decode(wire, x, when)
    assert (decoded.shape, decoded.dtype, decoded.is_contiguous()) == (x.shape, x.dtype, True)
    assert decoded.isfinite().all()
    memory, flat = guarded(x.numel() * x.element_size(), 0, x.dtype)
    codec.add_(wire, flat.view(x.shape), when)
    assert torch.equal(flat.view(x.shape), decoded)
    codec.add_(wire, flat.view(x.shape), when)
    torch.testing.assert_close(flat.view(x.shape), 2 * decoded, rtol=TOLERANCE[x.dtype], atol=0)
    assert untouched(memory, 0)
    decoded.add_(1)
    assert raw(wire) == before, "decode answers memory of its own, and wires are read only"


@with_encode_
@some
@given(case=cases())
def test_what_is_decoded_and_what_is_left_are_all_there_was(row: Row, case: Case) -> None:
    """residual ← v - x̂, v = x + residual: to the bit. So x̂ + residual = v to the rounding of one sum."""
    codec, x, before = row.make(), case.tensor(), case.tensor(1)
    v, residual = x + before, before.clone()
    wire, _ = codec.encode_(x, residual, codec.init(x))
    decoded = codec.decode(wire, x)
    assert torch.equal(residual, v - decoded)
    assert largest(decoded.double() + residual.double() - v.double()) <= TOLERANCE[x.dtype] * largest(v, decoded)
    assert torch.equal(x, case.tensor())


@with_encode_
@some
@given(case=cases())
def test_with_no_residual_both_ways_to_encode_agree(row: Row, case: Case) -> None:
    codec, x = row.make(), case.tensor() + 0.0  # 0 + (-0) is +0, which a cast can tell from -0
    plain, after = codec.encode(x, codec.init(x))
    fed, after_fed = codec.encode_(x, torch.zeros_like(x), codec.init(x))
    assert raw(plain) == raw(fed)
    assert tensors_of(after) == tensors_of(after_fed)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODERATE)
def test_16_bit_tensors(row: Row, dtype: torch.dtype, kind: str) -> None:
    codec, x = row.make(), Case((33, 17), kind, dtype).tensor()
    wire, _ = codec.encode(x, codec.init(x))
    decoded = codec.decode(wire, x)
    assert (decoded.shape, decoded.dtype) == (x.shape, dtype)
    assert len(raw(wire)) == codec.wire_bytes(x) if row.fixed else len(raw(wire)) <= codec.wire_bytes(x)
    if not row.feeds_itself:
        residual = torch.zeros_like(x)
        decoded = codec.decode(codec.encode_(x, residual, codec.init(x))[0], x)
        assert largest(decoded.double() + residual.double() - x.double()) <= TOLERANCE[dtype] * largest(x, decoded)


# ---------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("row", [row for row in ROWS if row.feedable or row.feeds_itself], ids=text)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_over_100_steps_nothing_is_lost(row: Row, dtype: torch.dtype) -> None:
    """Σ decoded + the last residual = Σ x; of 16-bit tensors as of float32, which residuals are of."""
    codec: Codec = row.make() if row.feeds_itself else feedback(row.make())
    case = Case((33, 17), "normal", dtype)
    state = codec.init(case.tensor())
    arrived, given_in = torch.zeros(2, 33, 17, dtype=torch.float64)
    for step in range(1, 101):
        x = case.tensor(step)
        given_in += x
        when = EncodeContext(step, rank=1)
        wire, state = codec.encode(x, state, when)
        codec_of = codec.decode(wire, x, when)
        arrived += codec_of
    (left,) = residuals(state)
    held_in = torch.float64 if dtype is torch.float64 else torch.float32
    assert (left.shape, left.dtype) == (x.shape, held_in)
    assert largest(arrived + left - given_in) <= TOLERANCE[held_in] * 300, "300: the sum of the largest entries"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_small_against_the_residual_is_not_lost(dtype: torch.dtype) -> None:
    """0.5 + 2^-10 is 0.5 in bfloat16: a residual would never get beyond τ."""
    codec, x, arrived = feedback(compression.threshold(0.5)), torch.full((4,), 2.0**-10, dtype=dtype), 0.0
    state = codec.init(x)
    for _ in range(512 + 16):
        wire, state = codec.encode(x, state)
        arrived += float(codec.decode(wire, x)[0])
    assert arrived == 0.5
    assert state.memory.residual.tolist() == [2.0**-6] * 4


def test_feedback_around_a_sum_whose_wires_mean_nothing_alone() -> None:
    """TernGrad's count from 0, so that a single one of three decodes to 2s less. The residual after 16 bits is right.

    `feedback` refuses this codec, for its error is too large.
    """
    codec, case = Feedback(compression.terngrad(clip=0.5)), Case((33, 17), "normal", torch.bfloat16)
    xs = [case.tensor(rank) for rank in range(3)]
    agreed = max(codec.statistic(x, None) or 0.0 for x in xs)
    when = [EncodeContext(1, rank, 9, 3, agreed) for rank in range(3)]
    found = [codec.encode(x, None, each) for x, each in zip(xs, when, strict=True)]
    total = torch.stack([wire for wire, _ in found]).sum(0, dtype=torch.int32)
    left = sum(state.memory.residual.double() for _, state in found)
    arrived = codec.decode(total, xs[0], when[0]).double()
    scale = float(torch.tensor(agreed, dtype=torch.bfloat16))
    torch.testing.assert_close(arrived + left, sum(x.double() for x in xs), rtol=0, atol=3 * scale * 2.0**-8)


def test_feedback_goes_around_a_codec_once() -> None:
    with pytest.raises(ValueError, match=r"feedback\(bf16\(\)\) keeps its own residual; use it without"):
        feedback(feedback(compression.bf16()))
    for row in ROWS:
        if row.feeds_itself:
            with pytest.raises(ValueError, match="use it without feedback"):
                feedback(row.make())


@pytest.mark.parametrize("row", [row for row in ROWS if row.diverges], ids=text)
def test_feedback_refuses_a_codec_whose_error_may_be_larger_than_what_it_encodes(row: Row) -> None:
    with pytest.raises(ValueError, match=r"may be larger than its input.*use it without feedback"):
        feedback(row.make())


@pytest.mark.parametrize("name", ["int8", "one_bit", "sign", "dynamic8", "qsgd", "terngrad", "natural"])
def test_whole_and_complex_numbers_are_refused(name: str) -> None:
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=f"codecs take dense tensors of float32.*got {dtype}"):
            CODECS[name]().encode(torch.ones(40, 40, dtype=dtype))


# ---------------------------------------------------------------------- laws of one tensor


@pytest.mark.parametrize("row", [row for row in ROWS if row.law == "lossless"], ids=text)
@some
@given(case=cases())
def test_lossless(row: Row, case: Case) -> None:
    codec, x = row.make(), case.tensor()
    assert raw(codec.decode(codec.encode(x, codec.init(x))[0], x).reshape(-1)) == raw(x.reshape(-1))


@pytest.mark.parametrize("row", [row for row in ROWS if row.law == "contraction" and not row.draws], ids=text)
@some
@given(case=cases(MODERATE))
def test_contraction(row: Row, case: Case) -> None:
    """‖x - x̂‖² ≤ (1 - δ) ‖x‖²."""
    codec, x = row.make(), case.tensor()
    error = codec.decode(codec.encode(x, codec.init(x))[0], x).double() - x.double()
    delta = codec.facts.law.bound(x)
    assert 0 <= delta <= 1
    assert float((error**2).sum()) <= (1 - delta) * float((x.double() ** 2).sum()) * (1 + 1e-6)


def drawn(codec: Codec, x: Tensor, times: int) -> Tensor:
    """x̂ of that many steps, (times, *x.shape), float64."""
    found = []
    for step in range(1, times + 1):
        when = EncodeContext(step, rank=2, tensor=11)
        found.append(codec.decode(codec.encode(x, codec.init(x), when)[0], x, when).double())
    return torch.stack(found)


def squared_errors(found: Tensor, x: Tensor) -> tuple[float, float]:
    """The mean of ‖x̂ - x‖² over the draws, and its standard error."""
    errors = ((found - x.double()) ** 2).flatten(1).sum(dim=1)
    return float(errors.mean()), float(errors.std() / len(errors) ** 0.5)


def mixed(dtype: torch.dtype = torch.float32) -> Tensor:
    """Small ones, equal ones, zeros, and a large one, (3, 5)."""
    x = Case((3, 5), "normal", dtype, 5).tensor()
    x[0, :3], x[1, 2:], x[2, 4] = 0, -0.5, 8
    return x


@pytest.mark.parametrize("row", [row for row in ROWS if row.law == "contraction" and row.draws], ids=text)
def test_contraction_in_the_mean(row: Row) -> None:
    codec, x = row.make(), mixed()
    mean, standard_error = squared_errors(drawn(codec, x, 400), x)
    assert mean <= (1 - codec.facts.law.bound(x)) * float((x.double() ** 2).sum()) * (1 + 1e-6) + 4 * standard_error


@pytest.mark.parametrize("row", [row for row in ROWS if row.law == "unbiased"], ids=text)
def test_unbiased(row: Row) -> None:
    """2,000 draws: |mean - x| < 4 standard errors for each element, and E ‖x̂ - x‖² ≤ bound · ‖x‖²."""
    codec, x = row.make(), mixed()
    found = drawn(codec, x, 2000)
    standard_error = found.std(dim=0) / len(found) ** 0.5
    apart = (found.mean(dim=0) - x).abs() > 4 * standard_error + 1e-6 * largest(x)
    assert not apart.any(), (
        f"biased at {x[apart]}; if a level there is drawn less than 20 times, try another seed in the row"
    )
    mean, slack = squared_errors(found, x)
    assert mean <= codec.facts.law.bound(x) * float((x.double() ** 2).sum()) * (1 + 1e-6) + 4 * slack


@pytest.mark.parametrize("row", [row for row in ROWS if row.draws], ids=text)
def test_draws_follow_from_the_occasion(row: Row) -> None:
    """Another step draws otherwise; so does another rank, unless wires of all ranks hold the same entries."""
    codec, x = row.make(), NORMAL.tensor()

    def wire(**context: int) -> bytes:
        return raw(codec.encode(x, codec.init(x), EncodeContext(**context))[0])

    assert wire(step=3, rank=1, tensor=9) == wire(step=3, rank=1, tensor=9)
    assert wire(step=3, rank=1, tensor=9) != wire(step=4, rank=1, tensor=9)
    assert wire(step=3, rank=1, tensor=9) != wire(step=3, rank=1, tensor=10)
    assert (wire(step=3, rank=1, tensor=9) == wire(step=3, rank=2, tensor=9)) == (row.sparse and row.summable)


@pytest.mark.parametrize("row", [row for row in ROWS if row.summable], ids=text)
@some
@given(case=cases(MODERATE), terms=st.integers(2, 7))
def test_the_sum_of_wires_decodes_to_the_sum_of_tensors(row: Row, case: Case, terms: int) -> None:
    """The decoded sum is exact to the rounding of the wire's own numbers; and every rank decodes it alike."""
    codec, xs = row.make(), [case.tensor(rank) for rank in range(terms)]
    statistics = [codec.statistic(x, codec.init(x)) for x in xs]
    agreed = None if statistics[0] is None else max(each for each in statistics if each is not None)
    whens = [EncodeContext(4, rank, 9, terms, agreed) for rank in range(terms)]
    wires = [codec.encode(x, codec.init(x), when)[0] for x, when in zip(xs, whens, strict=True)]
    alone = [when._replace(terms=1) for when in whens]
    singles = sum(
        codec.decode(codec.encode(x, codec.init(x), when)[0], x, when).double()
        for x, when in zip(xs, alone, strict=True)
    )
    total = wires[0].clone()
    for wire in wires[1:]:
        total += wire
    assert len(raw(total)) == codec.wire_bytes(xs[0], terms)
    assert total.dtype is codec.wire_dtype(xs[0], terms)
    decoded = [codec.decode(total, xs[0], when) for when in whens]
    assert all(torch.equal(decoded[0], each) for each in decoded)
    rounding = TOLERANCE.get(total.dtype, 0.0) + TOLERANCE[xs[0].dtype]
    assert largest(decoded[0].double() - singles) <= terms * rounding * largest(*xs, *decoded)
