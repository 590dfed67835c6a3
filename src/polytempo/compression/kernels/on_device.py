"""Kernels of `int8`, `one_bit`, `qsgd` and `top_k` for accelerators that Triton drives.

The functions have the signatures of their native twins, and the same bits. An encoder reads v = x + residual once to
find NaN and infinities, and tells the host (-1, or the first of them), before anything has changed. Triton comes with
torch's builds for accelerators; without it torch does all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from polytempo.compression.encoding.fields import to_float
from polytempo.native.kernels.codes_drawn import Fields

_MOST = 2**31 - 2**16
"""Elements that int32 counts, with a tile beyond the last."""
_TILE = 1024
_PIECE = 4096
"""Elements that one program reads at a time."""

Residual = Tensor | None


@cache
def _driven() -> str:
    """The type of the devices that Triton drives here; "" where there is none, or no Triton."""
    try:
        driver = import_module("triton.runtime").driver
        return str(driver.active.get_active_torch_device().type)
    except (ImportError, RuntimeError, AttributeError):
        return ""


def fits(*tensors: Residual) -> bool:
    """True if there are kernels for these: float32 of one shape, contiguous, on a device that Triton drives."""
    there = [t for t in tensors if t is not None]
    first = there[0]
    return (
        first.device.type == _driven()
        and 0 < first.numel() < _MOST
        and all(t.dtype is torch.float32 and t.is_contiguous() and t.shape == first.shape for t in there)
    )


def int8_(x: Tensor, residual: Residual, block: int, scales: Tensor, codes: Tensor) -> int:
    """See `codes_dense.int8_`. Cost: x and the residual read twice (three times where a block is over 4,096)."""
    least, greatest = 2.0**-126, float.fromhex("0x1.020406p121")
    bad = _first_unfinite(x, residual)
    if bad < 0:
        rows, columns = _tiles(block)
        kinds = _kinds(residual, rows=rows, columns=columns, least=least, greatest=greatest)
        _run("int8_encode", -(-scales.numel() // rows), x, *_given(x, residual), block, scales, codes, **kinds)
    return bad


def add_int8_(scales: Tensor, codes: Tensor, block: int, out: Tensor) -> None:
    """See `codes_dense.add_int8_`."""
    _run("int8_add", _programs(out), scales, codes, block, out, out.numel(), tile=_TILE)


def one_bit_(x: Tensor, residual: Residual, means: Tensor, words: Tensor, row_length: int) -> int:
    """See `codes_dense.one_bit_`. Cost: x and the residual read three times."""
    bad = _first_unfinite(x, residual)
    if bad >= 0:
        return bad
    num_rows, tiles = x.numel() // row_length, -(-row_length // _PIECE)
    sums = torch.empty(num_rows * tiles, 3, dtype=torch.float64, device=x.device)
    source = _given(x, residual)
    _run("one_bit_sums", num_rows * tiles, x, *source, row_length, tiles, sums, **_kinds(residual, tile=_PIECE))
    down, up, count = sums.view(num_rows, tiles, 3).sum(1).unbind(1)
    pairs = torch.stack([down / (row_length - count).clamp(min=1), up / count.clamp(min=1)], 1)
    means.copy_(to_float(pairs).view(-1))
    bits = words.view(torch.int32)
    kinds = _kinds(residual, words_each=_PIECE // 32)
    _run("one_bit_encode", num_rows * tiles, x, source[0], row_length, tiles, means, bits, **kinds)
    return -1


def add_one_bit_(means: Tensor, words: Tensor, out: Tensor, row_length: int) -> None:
    """See `codes_dense.add_one_bit_`."""
    bits = words.view(torch.int32)
    _run("one_bit_add", _programs(out), means, bits, out, row_length, out.numel(), tile=_TILE)


def qsgd_encode(x: Tensor, residual: Residual, bucket: int, levels: int, fields: Fields, key: int, wire: Tensor) -> int:
    """See `codes_drawn.qsgd_encode`. Cost: x and the residual read twice, and 4 bytes an element written and read."""
    bad = _first_unfinite(x, residual)
    if bad >= 0:
        return bad
    num_buckets, (rows, columns) = -(-x.numel() // bucket), _tiles(bucket)
    steps, words = wire[: 4 * num_buckets].view(torch.float32), wire[4 * num_buckets :].view(torch.int32)
    codes = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
    most = torch.finfo(torch.float32).max / levels * (1 - 2.0**-22)
    kinds = _kinds(residual, levels=levels, most=most, rows=rows, columns=columns)
    keys = (key & 0xFFFFFFFF, key >> 32)
    _run("qsgd_encode", -(-num_buckets // rows), x, *_given(x, residual), bucket, *keys, steps, codes, **kinds)
    _run("pack", -(-words.numel() // _TILE), codes, x.numel(), words, words.numel(), **_layout(fields), tile=_TILE)
    return -1


def qsgd_decode(wire: Tensor, out: Tensor, bucket: int, levels: int, fields: Fields, add: bool) -> None:
    """See `codes_drawn.qsgd_decode`."""
    head = 4 * -(-out.numel() // bucket)
    steps, words = wire[:head].view(torch.float32), wire[head:].view(torch.int32)
    kinds = {"levels": levels, "add": add, "tile": _TILE, **_layout(fields)}
    _run("qsgd_decode", _programs(out), steps, words, out, out.numel(), bucket, **kinds)


def top(x: Tensor, residual: Residual, k: int, indices: Tensor, values: Tensor) -> int:
    """The k largest |v|, of equal ones the first: indices (int32, ascending) and values; residual ← v - them.

    A digit of 11, 11 and 9 bits at a time narrows the magnitude of the k-th. Cost: x and the residual read six times.
    """
    bad = _first_unfinite(x, residual)
    if bad >= 0:
        return bad
    source, programs = _given(x, residual), _programs(x)
    kinds = _kinds(residual, tile=_TILE)
    prefix, left = (torch.tensor([number], dtype=torch.int32, device=x.device) for number in (0, k))
    for shift, bits in ((20, 11), (9, 11), (0, 9)):
        counts = torch.zeros(2**bits, dtype=torch.int32, device=x.device)
        _run("count_digits", programs, x, *source, prefix, counts, shift=shift, digit_bits=bits, **kinds)
        from_here = counts.flip(0).cumsum(0, dtype=torch.int32).flip(0)  # elements with this digit or a larger one
        digit = (from_here >= left).sum(dtype=torch.int32).view(1) - 1
        left = left - (from_here - counts).index_select(0, digit)
        prefix = prefix << bits | digit
    above, equal = torch.empty(2, programs, dtype=torch.int32, device=x.device)
    _run("count_chosen", programs, x, *source, prefix, above, equal, **kinds)
    above, equal = (each.cumsum(0, dtype=torch.int32) - each for each in (above, equal))
    _run("collect", programs, x, *source, prefix, above, equal, left, indices, values, **kinds)
    return -1


def _first_unfinite(x: Tensor, residual: Residual) -> int:
    """The first element of v that is NaN or infinite, or -1. The host waits for it."""
    programs = -(-x.numel() // _PIECE)
    firsts = torch.empty(programs, dtype=torch.int32, device=x.device)
    _run("first_unfinite", programs, x, *_given(x, residual), firsts, **_kinds(residual, tile=_PIECE))
    first = int(firsts.min())
    return first if first < x.numel() else -1


def _given(x: Tensor, residual: Residual) -> tuple[Tensor, int]:
    """The residual, or x in a place that is not read; and the number of elements."""
    return (x if residual is None else residual), x.numel()


def _kinds(residual: Residual, **constants: float) -> dict[str, float]:
    """A kernel's constants: it is compiled for each of their values."""
    return {"has_residual": residual is not None, **constants}


def _programs(x: Tensor) -> int:
    return -(-x.numel() // _TILE)


def _tiles(length: int) -> tuple[int, int]:
    """Blocks of a program and elements of a block at a time, powers of two."""
    columns = min(2 ** math.ceil(math.log2(max(length, 2))), _PIECE)
    return max(1, _PIECE // columns), columns


def _layout(fields: Fields) -> dict[str, int]:
    return {"width": fields.width, "positions": fields.positions, "words_per_lane": fields.words}


def _run(name: str, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the device of its tensors."""
    kernels: Any = import_module("polytempo.compression.kernels.triton_kernels")
    device = next(each.device for each in arguments if isinstance(each, Tensor))
    run: Callable[..., object] = getattr(kernels, name)[(programs,)]
    with _current(device):
        run(*arguments, **constants, enable_fp_fusion=False)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton starts kernels on the current device. Its interpreter takes the CPU."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
