"""Random draws of codecs, element by element, and fields of a few bits for codes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from polytempo.compression.encoding.draw import _splitmix64, draw_key, draws, finalized, happens
from polytempo.compression.encoding.fields import Fields, dense_fields, num_words, packed, unpacked, whole_fields
from polytempo.core import EncodeContext

CPU = torch.device("cpu")


def test_published_numbers() -> None:
    """The first output of splitmix64 from 0, and lowbias32 by its definition on whole numbers."""
    assert _splitmix64(0) == 0xE220A8397B1DCDAF

    def lowbias32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    numbers = [0, 1, 2, 0xFFFF, 0x80000000, 0xFFFFFFFF]
    assert finalized(torch.tensor(numbers), 0).tolist() == [lowbias32(x) for x in numbers]


def test_draws_are_even_and_do_not_know_each_other() -> None:
    """Mean, variance, bytes, and correlation between neighbours: of the element, the step, the rank, the tensor."""
    count = 1 << 18
    key = draw_key(3, EncodeContext(5, 1, 77))
    bits = draws(key, count, CPU)
    uniform = bits.double() / 2**32
    assert abs(float(uniform.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / count)
    assert abs(float(uniform.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 255, minlength=256).double()
        chi_square = float(((counts - count / 256).square() / (count / 256)).sum())
        assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255), shift
    others = [EncodeContext(6, 1, 77), EncodeContext(5, 2, 77), EncodeContext(5, 1, 78), EncodeContext(1, 5, 77)]
    keys = [key, draw_key(4, EncodeContext(5, 1, 77)), *(draw_key(3, when) for when in others)]
    streams = [draws(each, count, CPU).double() / 2**32 - 0.5 for each in keys]
    limit = 4 / 12 / math.sqrt(count)
    for i, stream in enumerate(streams):
        for lag in (1, 2, 16, 512, 4096):
            assert abs(float((stream[lag:] * stream[:-lag]).mean())) < limit * 1.1, (i, lag)
        for j in range(i):
            assert abs(float((stream * streams[j]).mean())) < limit, (i, j)


def test_one_element_over_many_steps_is_even() -> None:
    """The other direction: the draws of one element in steps 1, 2, …"""
    drawn = torch.tensor([draw_key(0, EncodeContext(step)) for step in range(1, 4001)], dtype=torch.float64)
    firsts = torch.stack([draws(draw_key(0, EncodeContext(step)), 4, CPU) for step in range(1, 4001)]).double() / 2**32
    assert len(set(drawn.tolist())) == 4000
    assert ((firsts.mean(dim=0) - 0.5).abs() < 4 * math.sqrt(1 / 12 / 4000)).all()
    for left, right in pairwise(firsts.T - 0.5):
        assert abs(float((left * right).mean())) < 4 / 12 / math.sqrt(4000)
        assert abs(float((left[1:] * left[:-1]).mean())) < 4 / 12 / math.sqrt(4000)


def test_draws_go_on_where_they_are_asked_to() -> None:
    key = draw_key(0, EncodeContext())
    assert torch.equal(draws(key, 100, CPU)[40:], draws(key, 60, CPU, first=40))
    beyond = draws(key, 8, CPU, first=2**32 - 4)
    assert not torch.equal(beyond[4:], draws(key, 4, CPU)), "the index has more than 32 bits"
    assert happens(torch.tensor([0.0, 1.0]).repeat(5000), key).view(-1, 2).sum(dim=0).tolist() == [0, 5000]


# Fields.


def test_fields_lie_in_lanes() -> None:
    """Five codes of 4 bits: one lane. 129 of them: a block of 8 rows of 16, and a lane of one code."""
    fields = dense_fields(4)
    assert fields == Fields(4, 8, 1)
    assert packed(fields, torch.tensor([1, 2, 3, 4, 15])).tolist() == [0xF4321]
    codes = torch.arange(129) // 16
    assert packed(fields, codes).tolist() == [0x76543210] * 16 + [8]
    assert whole_fields(3) == Fields(3, 10, 1)
    assert packed(dense_fields(3), torch.full((32,), 7)).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("width", range(1, 17))
def test_fields_come_back(width: int) -> None:
    for fields in (dense_fields(width), whole_fields(width)):
        for count in (0, 1, 31, 512, 1000):
            codes = torch.randint(1 << width, (count,), generator=torch.Generator().manual_seed(count))
            words = packed(fields, codes)
            assert words.dtype == torch.int32
            assert len(words) == num_words(fields, count)
            assert torch.equal(unpacked(fields, words, count), codes)
