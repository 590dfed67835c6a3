"""A codec's input or wire may be NaN, damaged or too short: it is refused, and nothing has changed."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laws.codec_cases import NORMAL, Case, every_codec, guarded, tensors_of, untouched
from laws.codecs import ROWS, Row, text
from polytempo.compression.encoding.feedback import feedback
from polytempo.core import EncodeContext, NotFinite
from some_cases import examples

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
    """The error names its place and value, before anything has changed."""
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
    """The codec inside may pass it on or not; and the residual is unchanged."""
    codec, x = feedback(row.make()), NORMAL.tensor()
    assert not codec.facts.passes_nonfinite
    state = codec.encode(x, codec.init(x))[1]
    before = tensors_of(deepcopy(state))
    x.view(-1)[300] = value
    with pytest.raises(NotFinite, match=f"element 300 is {value}"):
        codec.encode(x, state, EncodeContext(2))
    assert tensors_of(state) == before


# ---------------------------------------------------------------------- arrivals

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
@settings(max_examples=examples(30), derandomize=True)
@given(
    shape=st.sampled_from([(), (0,), (7,), (33, 17), (1025,)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    damage=damages,
)
def test_a_damaged_wire_writes_nowhere_else(
    row: Row, shape: tuple[int, ...], dtype: torch.dtype, damage: tuple[str, int]
) -> None:
    """A ValueError refuses it, or it decodes to values of the right shape."""
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
