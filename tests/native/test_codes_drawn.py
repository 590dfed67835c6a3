"""The kernels of codecs that draw, against the same in torch: every instruction set, any address, the same bits."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from native.kernels import Buffer, assert_same_bits, choose, instruction_sets, library
from polytempo.compression import natural, qsgd
from polytempo.compression.codecs.qsgd import levels_drawn, steps_between_levels
from polytempo.compression.codecs.terngrad import own_scaler, ternaries
from polytempo.compression.encoding.draw import draws
from polytempo.compression.encoding.fields import Fields, dense_fields, num_words, packed, unpacked, whole_fields
from polytempo.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no native core here")

KEY = 0x9E3779B97F4A7C15
COUNTS = (0, 1, 17, 513, 5000)
OFFSETS = (0, 1)


class FieldsStructure(ctypes.Structure):
    """`pt_fields` of native/codes_drawn_abi.h."""

    _fields_ = tuple((name, ctypes.c_int32) for name in Fields._fields)


def normal(count: int, seed: int = 0) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3
    values[::7] = 0
    return values


def of(fields: Fields) -> ctypes.c_void_p:
    return ctypes.cast(ctypes.pointer(FieldsStructure(*fields)), ctypes.c_void_p)


def room(num_bytes: int, offset: int) -> Buffer:
    return Buffer(torch.zeros(num_bytes, dtype=torch.uint8), offset)


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize(("levels", "bucket"), [(4, 512), (1, 7), (2, 100), (127, 10_000), (1000, 600)])
def test_qsgd(isa: str, levels: int, bucket: int, fed: bool) -> None:
    fields = dense_fields((2 * levels).bit_length())
    for count, offset in [(c, o) for c in COUNTS for o in OFFSETS]:
        x, left = normal(count), normal(count, 1)
        v = x + left if fed else x
        source, residual = Buffer(x, offset), Buffer(left, offset)
        wire = room(qsgd(levels, bucket).wire_bytes(x), offset)
        assert (
            library().pt_qsgd_encode(
                *(
                    source.pointer,
                    residual.pointer if fed else None,
                    count,
                    bucket,
                    levels,
                    of(fields),
                    KEY,
                    wire.pointer,
                )
            )
            == -1
        )
        found, num_buckets = wire.values(), -(-count // bucket)
        steps = found[: 4 * num_buckets].clone().view(torch.float32)
        assert torch.allclose(steps, steps_between_levels(v, bucket, levels), rtol=2e-7, atol=0)
        each = steps.repeat_interleave(bucket)[:count]
        drawn = levels_drawn(v, each, levels, KEY)
        assert_same_bits(found[4 * num_buckets :].clone().view(torch.int32), packed(fields, drawn + levels))
        expected = drawn.to(torch.float32) * each
        assert_same_bits(residual.values(), v - expected if fed else left)
        for add in (0, 1):
            out = Buffer(left, offset)
            library().pt_qsgd_decode(wire.pointer, out.pointer, count, bucket, levels, of(fields), add)
            assert_same_bits(out.values(), left + expected if add else expected)


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize(("clip", "terms"), [(0.0, 1), (2.5, 1), (2.5, 3), (1.0, 9), (2.5, 200)])
def test_terngrad(isa: str, clip: float, terms: int, fed: bool) -> None:
    fields = whole_fields((2 * terms).bit_length())
    for count, offset in [(c, o) for c in COUNTS for o in OFFSETS]:
        x, left = normal(count), normal(count, 1)
        v = x + left if fed else x
        source, residual = Buffer(x, offset), Buffer(left, offset)
        given, own = residual.pointer if fed else None, ctypes.c_float(-1)
        assert library().pt_terngrad_scaler(source.pointer, given, count, clip, ctypes.addressof(own)) == -1
        assert own.value == pytest.approx(own_scaler(v, clip), rel=2e-7)
        scaler = own.value if terms == 1 else float(torch.tensor(own.value * 1.5))
        wire = room(4 * num_words(fields, count), offset)
        library().pt_terngrad_encode(*(source.pointer, given, count, own.value, scaler, of(fields), KEY, wire.pointer))
        drawn = ternaries(v, own.value, scaler, KEY)
        words = wire.values().view(torch.int32)
        assert_same_bits(words, packed(fields, drawn + 1))
        expected = drawn.to(torch.float32) * scaler
        assert_same_bits(residual.values(), v - expected if fed else left)
        total = words * terms  # as many ranks that all drew the same
        summed = (unpacked(fields, total, count) - terms).to(torch.float32) * scaler
        assert torch.equal(summed, (drawn * terms).to(torch.float32) * scaler)
        for add in (0, 1):
            out, read = Buffer(left, offset), Buffer(total, offset)
            library().pt_terngrad_decode(read.pointer, out.pointer, count, scaler, terms, of(fields), add)
            assert_same_bits(out.values(), left + summed if add else summed)


@pytest.mark.parametrize("fed", [False, True])
def test_natural(isa: str, fed: bool) -> None:
    signs = dense_fields(1)
    for count, offset in [(c, o) for c in COUNTS for o in OFFSETS]:
        x, left = normal(count), normal(count, 1)
        x[::5] *= 1e-39
        x[1::11] = 3e38
        left[1::11] = 0
        v = x + left if fed else x
        source, residual = Buffer(x, offset), Buffer(left, offset)
        wire = room(natural().wire_bytes(x), offset)
        assert (
            library().pt_natural_encode(*(source.pointer, residual.pointer if fed else None, count, KEY, wire.pointer))
            == -1
        )
        bits = v.view(torch.int32).to(torch.int64)
        powers = (((bits & 0x7FFFFFFF) + (draws(KEY, count, v.device) >> 9)) >> 23).clamp(max=254)
        padded = torch.zeros(-(-count // 4) * 4, dtype=torch.uint8)
        padded[:count] = powers
        assert_same_bits(
            wire.values(), torch.cat([padded, packed(signs, (bits < 0).to(torch.int64)).view(torch.uint8)])
        )
        sizes = (powers.to(torch.int32) << 23).view(torch.float32)
        expected = torch.where(bits < 0, -sizes, sizes)
        assert_same_bits(residual.values(), v - expected if fed else left)
        for add in (0, 1):
            out = Buffer(left, offset)
            library().pt_natural_decode(wire.pointer, out.pointer, count, add)
            assert_same_bits(out.values(), left + expected if add else expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_residual_changes_where_something_is_no_number(isa: str, bad: float) -> None:
    fields = dense_fields(4)
    for index in (0, 16, 2500, 4998):
        x, left = normal(4999), normal(4999, 1)
        left[index] = bad
        source, residual, wire = Buffer(x, 1), Buffer(left, 1), room(6000, 1)
        own = ctypes.c_float(7)
        assert index // 512 * 512 == library().pt_qsgd_encode(
            source.pointer, residual.pointer, 4999, 512, 4, of(fields), KEY, wire.pointer
        )
        assert index // 2048 * 2048 == library().pt_natural_encode(
            source.pointer, residual.pointer, 4999, KEY, wire.pointer
        )
        assert library().pt_terngrad_scaler(source.pointer, residual.pointer, 4999, 2.5, ctypes.addressof(own)) == 0
        assert own.value == 7
        assert_same_bits(residual.values(), left)
        assert library().pt_qsgd_encode(residual.pointer, None, 4999, 512, 4, of(fields), KEY, wire.pointer) >= 0
        assert library().pt_natural_encode(residual.pointer, None, 4999, KEY, wire.pointer) >= 0
        assert library().pt_terngrad_scaler(residual.pointer, None, 4999, 0.0, ctypes.addressof(own)) == 0


def test_sums_have_the_same_bits_everywhere() -> None:
    """Steps and scalers of all instruction sets, on values with sums that depend on the order."""
    x = normal(5000) * torch.logspace(-6, 6, 5000)
    before, seen = library().pt_isa().decode(), set()
    for name in instruction_sets():
        choose(name)
        wire, own = room(qsgd(4, 700).wire_bytes(x), 0), ctypes.c_float()
        source = Buffer(x, 1)
        library().pt_qsgd_encode(source.pointer, None, 5000, 700, 4, of(dense_fields(4)), KEY, wire.pointer)
        library().pt_terngrad_scaler(source.pointer, None, 5000, 1.0, ctypes.addressof(own))
        seen.add((bytes(wire.values().tolist()), own.value))
    choose(before)
    assert len(seen) == 1
