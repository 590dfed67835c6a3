"""The kernel that looks for NaN and infinities: every instruction set finds the first one, at any address."""

from __future__ import annotations

import math

import pytest
import torch

from native.kernels import DTYPES, Buffer, library
from polytempo.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no native core here")
FLOATS = DTYPES[:4]


def found(values: torch.Tensor, offset_bytes: int = 0) -> int:
    buffer = Buffer(values, offset_bytes)
    index: int = library().pt_unfinite(DTYPES.index(values.dtype), buffer.pointer, values.numel())
    return index


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_is_found(isa: str, dtype: torch.dtype, bad: float) -> None:
    values = torch.full((4099,), torch.finfo(dtype).max, dtype=dtype)
    values[::2] = -values[::2]
    assert found(values, 1) == -1
    for index in (4098, 4096, 4095, 17, 0):
        values[index] = bad
        assert found(values, 1) == index
    assert found(values[:0]) == -1


def test_only_floats_are_looked_at() -> None:
    assert [found(torch.ones(3, dtype=dtype)) for dtype in DTYPES] == [-1] * 4 + [-2] * 6
