"""Every codec of the catalogue obeys these laws.

The tensors are drawn by hypothesis: a shape, a kind of values, a seed, a dtype, and where in memory they begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laws.codecs import ROWS, Row, text
from polytempo import compression
from polytempo.compression.feedback import Feedback, feedback
from polytempo.core import Codec, CodecState, EncodeContext, NotFinite, Residual
from polytempo.spec.catalogue import CODECS

every_codec = pytest.mark.parametrize("row", ROWS, ids=text)
with_encode_ = pytest.mark.parametrize("row", [row for row in ROWS if not row.feeds_itself], ids=text)
some = settings(max_examples=16, derandomize=True)

SHAPES = [(), (0,), (1,), (2,), (7,), (5, 3), (4, 0), (3, 5, 2), (257,), (33, 17), (1, 70), (1025,), (64, 40)]
"""None, one, a few, and around what a vector register, a block and a bucket hold."""

EXTREME = ["zeros", "denormal", "huge"]
MODERATE = ["ones", "normal", "outliers", "few", "wide"]

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of a sum, relative to its largest term."""

GUARD = 64
"""Bytes before and after memory that is written to."""


class Case(NamedTuple):
    """How to make tensors: they begin `offset` elements after an address that vectors like."""

    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype
    seed: int = 0
    offset: int = 0

    def tensor(self, number: int = 0) -> Tensor:
        """Tensor `number` of this case."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        like = torch.empty(self.shape)
        normal = torch.randn(self.offset + like.numel(), generator=generator, dtype=torch.float64)
        other = torch.rand(len(normal), generator=generator, dtype=torch.float64)
        values = {
            "zeros": torch.zeros_like(normal),
            "ones": torch.full_like(normal, 1.5),
            "normal": normal,
            "outliers": torch.where(other < 0.01, 1e3 * normal, normal),
            "few": torch.where(other < 0.9, 0.0, normal),
            "wide": normal.sign() * 10 ** (6 * other - 3),
            "denormal": 1e-41 * normal,
            "huge": 1e30 * normal,
        }[self.kind]
        return (values + 0.0).to(self.dtype)[self.offset :].view(self.shape)


def cases(kinds: Sequence[str] = (*EXTREME, *MODERATE)) -> st.SearchStrategy[Case]:
    """All that a codec has to bear."""
    return st.builds(
        Case,
        st.sampled_from(SHAPES),
        st.sampled_from(kinds),
        st.sampled_from([torch.float32, torch.float64]),
        st.integers(0, 999),
        st.integers(0, 3),
    )


NORMAL = Case((33, 17), "normal", torch.float32)


def largest(*tensors: Tensor) -> float:
    """The largest magnitude."""
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def raw(wire: Tensor) -> bytes:
    """The wire's bytes."""
    return wire.view(torch.uint8).numpy().tobytes()


def guarded(num_bytes: int, filled: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory of which only the middle may be written to, and that middle."""
    memory = torch.full((num_bytes + 2 * GUARD,), filled, dtype=torch.uint8)
    return memory, memory[GUARD : GUARD + num_bytes].view(dtype)


def untouched(memory: Tensor, filled: int) -> bool:
    """Whether the guards are as they were."""
    return bool((memory[:GUARD] == filled).all() and (memory[-GUARD:] == filled).all())


def residuals(state: CodecState) -> list[Tensor]:
    """All residuals of a state."""
    if isinstance(state, Residual):
        return [] if state.residual is None else [state.residual]
    return [each for part in state for each in residuals(part)] if isinstance(state, tuple) else []


def tensors_of(state: CodecState) -> list[object]:
    """A state's leaves, tensors as their bytes."""
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in tensors_of(part)]
    return [raw(state.reshape(-1)) if isinstance(state, Tensor) else state]


# ---------------------------------------------------------------------- the catalogue


def test_every_codec_has_a_row() -> None:
    """All that the command line can name; `feedback` goes around one."""
    assert {row.text.partition("(")[0] for row in ROWS} == set(CODECS) - {"feedback"}


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
    """Whatever the memory held before; nothing beside the memory is touched, and x stays as it is."""
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
    """TernGrad's count from 0, so that a single one of three decodes to 2s less. What is left of 16 bits is right.

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
    with pytest.raises(ValueError, match=r"feedback\(bf16\(\)\) keeps what it has not sent already; use it without"):
        feedback(feedback(compression.bf16()))
    for row in ROWS:
        if row.feeds_itself:
            with pytest.raises(ValueError, match="use it without feedback"):
                feedback(row.make())


@pytest.mark.parametrize("row", [row for row in ROWS if row.diverges], ids=text)
def test_feedback_refuses_a_codec_whose_error_may_be_larger_than_what_it_encodes(row: Row) -> None:
    with pytest.raises(ValueError, match=r"may be larger than what it encodes.*use it without feedback"):
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
    """Small ones, equal ones, zeros, and one that is large, (3, 5)."""
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
    assert ((found.mean(dim=0) - x).abs() <= 4 * standard_error + 1e-6 * largest(x)).all()
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
    """To the rounding of the wire's own numbers; and every rank decodes it alike."""
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


# ---------------------------------------------------------------------- NaN and infinities

BAD = [float("nan"), float("inf"), float("-inf")]
places = pytest.mark.parametrize("index", [0, 13, 560])


@places
@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize("row", [row for row in ROWS if row.passes], ids=text)
def test_what_is_not_finite_arrives_as_such(row: Row, value: float, index: int) -> None:
    codec, x = row.make(), NORMAL.tensor()
    clean = codec.decode(codec.encode(x)[0], x)
    x.view(-1)[index] = clean.view(-1)[index] = value
    torch.testing.assert_close(codec.decode(codec.encode(x)[0], x), clean, rtol=0, atol=0, equal_nan=True)


@places
@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("row", [row for row in ROWS if not row.passes], ids=text)
def test_what_is_not_finite_is_refused(row: Row, dtype: torch.dtype, value: float, index: int) -> None:
    """By its place and value, before anything has changed."""
    codec, x = row.make(), Case((33, 17), "normal", dtype).tensor()
    state = codec.encode(x, codec.init(x))[1]
    x.view(-1)[index] = value
    before = tensors_of(deepcopy(state))
    with pytest.raises(NotFinite, match=f"element {index} is {value}, which {row.text.partition('(')[0]}") as refusal:
        codec.encode(x, state, EncodeContext(2))
    assert (refusal.value.index, str(refusal.value.value)) == (index, str(value))
    assert tensors_of(state) == before
    if not row.feeds_itself:
        residual = torch.ones_like(x)
        with pytest.raises(NotFinite, match=f"element {index} is"):
            codec.encode_(x, residual, state, EncodeContext(2))
        assert (residual == 1).all()
        assert tensors_of(state) == before


@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize("row", [row for row in ROWS if row.feedable], ids=text)
def test_feedback_refuses_what_would_stay_for_ever(row: Row, value: float) -> None:
    """Whether the codec inside would hand it on or not; and the residual is as it was."""
    codec, x = feedback(row.make()), NORMAL.tensor()
    assert not codec.facts.passes_nonfinite
    state = codec.encode(x, codec.init(x))[1]
    before = tensors_of(deepcopy(state))
    x.view(-1)[300] = value
    with pytest.raises(NotFinite, match=f"element 300 is {value}"):
        codec.encode(x, state, EncodeContext(2))
    assert tensors_of(state) == before


# ---------------------------------------------------------------------- what may arrive

damages = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 4096)),
    st.tuples(st.just("flip"), st.integers(0, 2**20)),
    st.tuples(st.just("noise"), st.integers(0, 2**20)),
    st.tuples(st.just("more"), st.integers(1, 16)),
)


def damaged(wire: Tensor, how: str, number: int) -> Tensor:
    """`wire` with something wrong: shorter, longer, a bit flipped, or nothing of it left."""
    unit = 4 if wire.dtype is torch.uint8 else 1
    if how == "cut":
        return wire[: wire.numel() * (number % 97) // 97 // unit * unit].clone()
    if how == "more":
        return torch.cat([wire, wire.new_ones(unit * number)])
    bytes_ = wire.clone().view(torch.uint8)
    generator = torch.Generator().manual_seed(number)
    if how == "noise":
        bytes_.copy_(torch.randint(0, 256, bytes_.shape, generator=generator, dtype=torch.uint8))
    elif bytes_.numel():
        bytes_[number % bytes_.numel()] ^= 1 << number % 8
    return bytes_.view(wire.dtype)


@every_codec
@settings(max_examples=30, derandomize=True)
@given(
    shape=st.sampled_from([(), (0,), (7,), (33, 17), (1025,)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    damage=damages,
)
def test_a_damaged_wire_writes_nowhere_else(
    row: Row, shape: tuple[int, ...], dtype: torch.dtype, damage: tuple[str, int]
) -> None:
    """It is refused by a ValueError, or decodes to something of the right shape."""
    codec, x = row.make(), Case(shape, "normal", dtype).tensor()
    wire = damaged(codec.encode(x, codec.init(x))[0], *damage)
    memory, flat = guarded(x.numel() * x.element_size(), 0x55, dtype)
    flat.zero_()
    try:
        decoded = codec.decode(wire, x)
        assert (decoded.shape, decoded.dtype) == (x.shape, dtype)
        codec.add_(wire, flat.view(x.shape))
    except ValueError:
        pass
    assert untouched(memory, 0x55)


@every_codec
@pytest.mark.parametrize("num_left", [0, 1])
def test_a_wire_that_is_too_short_is_refused(row: Row, num_left: int) -> None:
    codec, x = row.make(), NORMAL.tensor()
    wire, _ = codec.encode(x, codec.init(x))
    short = wire[: num_left * (4 if wire.dtype is torch.uint8 else 1)].clone()
    for decode in (lambda: codec.decode(short, x), lambda: codec.add_(short, x.clone())):
        with pytest.raises(ValueError, match="wire"):
            decode()
