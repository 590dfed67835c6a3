"""Kernels of the dense codes: every instruction set gives the wires of the versions in torch, at any address."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from native.kernels import assert_same_bits, by_torch, library, numbers
from polytempo.compression import bf16, dynamic8, fp16, int8, one_bit, sign
from polytempo.core import Codec, NotFinite
from polytempo.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no native core here")

CODECS: list[Codec] = [bf16(), fp16(), int8(), int8(7), dynamic8(), dynamic8(33), one_bit(), sign(), sign(False)]
SHAPES = [(0,), (1,), (31,), (33,), (5, 1), (1, 1024), (3, 1027), (40, 64), (2, 3, 5)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.facts.name)


def shifted(values: Tensor, num_bytes: int) -> Tensor:
    """The same where no vector begins."""
    memory = torch.zeros(values.numel() + 16, dtype=values.dtype)
    first = num_bytes // values.element_size()
    memory[first : first + values.numel()] = values.reshape(-1)
    return memory[first : first + values.numel()].view(values.shape)


@every_codec
def test_kernels_and_torch_agree(isa: str, codec: Codec) -> None:
    def everything(codec: Codec, shape: tuple[int, ...]) -> list[Tensor]:
        x, left, start = numbers(shape, 1), numbers(shape, 2) / 3, numbers(shape, 3)
        residual, out = shifted(left, 4), shifted(start, 12)
        memory = torch.full((codec.wire_bytes(x) + 8,), 0xA5, dtype=torch.uint8)
        room = memory[4:-4] if codec.wire_dtype(x) is torch.uint8 else memory[4:-4].view(codec.wire_dtype(x))
        fed, _ = codec.encode_(shifted(x, 4), residual, out=room)
        assert fed.data_ptr() == room.data_ptr() or not fed.numel()
        assert memory[:4].tolist() == memory[-4:].tolist() == [0xA5] * 4
        codec.add_(fed, out)
        return [codec.encode(x)[0], fed.clone(), residual, out, codec.decode(fed, x)]

    for shape in SHAPES:
        for ours, torchs in zip(everything(codec, shape), everything(by_torch(codec), shape), strict=True):
            assert_same_bits(ours + 0, torchs + 0)  # of zeros either sign will do


@every_codec
def test_the_first_that_is_no_number_is_named_and_nothing_has_changed(isa: str, codec: Codec) -> None:
    x, left = numbers((3, 1027), 1), numbers((3, 1027), 2)
    for index, bad in ((3 * 1027 - 1, math.nan), (2000, math.inf), (1027, -math.inf), (0, math.nan)):
        x.view(-1)[index] = bad
        residual = left.clone()
        with pytest.raises(NotFinite) as caught:
            codec.encode_(x, residual)
        assert caught.value.index == index
        assert math.isnan(bad) == math.isnan(caught.value.value)
        assert_same_bits(residual, left)
        if codec.facts.passes_nonfinite:
            decoded = codec.decode(codec.encode(x)[0], x).view(-1)[index]
            assert str(float(decoded)) == str(bad)
        else:
            with pytest.raises(NotFinite, match=f"element {index} "):
                codec.encode(x)


@every_codec
def test_a_sum_beyond_floats_is_no_number(isa: str, codec: Codec) -> None:
    x, left = torch.ones(3, 2000), torch.ones(3, 2000)
    x[2, 1999] = left[2, 1999] = 3e38
    residual = left.clone()
    with pytest.raises(NotFinite, match="element 5999 is inf"):
        codec.encode_(x, residual)
    assert torch.equal(residual, left)
    with pytest.raises(NotFinite, match="element 1 is nan"):
        codec.encode_(torch.ones(2), torch.tensor([1.0, math.nan]))


@every_codec
def test_the_ends_of_the_range(isa: str, codec: Codec) -> None:
    for most in (torch.finfo(torch.float32).max, 1e-36, 1e-38, 1e-45):
        x, residual = torch.tensor([most, -most, most / 3, 0.0]).repeat(16), torch.zeros(64)
        wire, _ = codec.encode_(x, residual)
        assert residual.isfinite().all()
        assert_same_bits(residual, x - codec.decode(wire, x))
        assert_same_bits(wire, by_torch(codec).encode(x)[0])


def test_impossible_calls_are_refused() -> None:
    core = library()
    assert core.pt_cast_encode(0, None, None, 1.0, None, 0) == -2
    assert core.pt_cast_add(1, None, None, 0) == 1
    assert core.pt_int8_encode(None, None, 0, None, None, 0) == -2
    assert core.pt_int8_add(None, None, 0, None, 0) == 1
    assert core.pt_dynamic8_encode(None, None, 0, None, None, None, 0) == -2
    assert core.pt_dynamic8_add(None, None, 0, None, None, 0) == 1
