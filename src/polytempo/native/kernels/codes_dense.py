"""The kernels of dense codes (native/codes_dense.h), on tensors. Call `fits` first."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.native.call import DTYPES
from polytempo.native.library import available, required

Residual = Tensor | None
"""A residual r: v = x + r is encoded, and r becomes v - decode(code)."""


def fits(*tensors: Residual) -> bool:
    """True if there are kernels for these: float32 of one shape, contiguous, on the CPU; and the native core."""
    there = [t for t in tensors if t is not None]
    return available() and all(
        t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() and t.shape == there[0].shape for t in there
    )


def cast_(x: Tensor, residual: Residual, limit: float, wire: Tensor) -> int:
    """wire ← v in its 16-bit dtype, finite values clamped to ±limit. -1, or the index of a NaN or infinity.

    All encoders here answer so. Only without a residual does this one pass NaN and infinities on.
    """
    return int(
        required().pt_cast_encode(
            *(DTYPES[wire.dtype], x.data_ptr(), address(residual), limit, wire.data_ptr(), x.numel())
        )
    )


def add_cast_(wire: Tensor, out: Tensor) -> None:
    """Add a wire of 16-bit floats to out."""
    status = required().pt_cast_add(DTYPES[wire.dtype], wire.data_ptr(), out.data_ptr(), out.numel())
    assert status == 0, "the kernel refuses checked arguments"


def int8_(x: Tensor, residual: Residual, block: int, scales: Tensor, codes: Tensor) -> int:
    """scales (num_blocks,) and codes (numel,) of v."""
    return int(
        required().pt_int8_encode(
            *(x.data_ptr(), address(residual), block, scales.data_ptr(), codes.data_ptr(), x.numel())
        )
    )


def add_int8_(scales: Tensor, codes: Tensor, block: int, out: Tensor) -> None:
    """Add scale · code to out."""
    status = required().pt_int8_add(scales.data_ptr(), codes.data_ptr(), block, out.data_ptr(), out.numel())
    assert status == 0, "the kernel refuses checked arguments"


def dynamic8_(x: Tensor, residual: Residual, block: int, tree: Tensor, scales: Tensor, codes: Tensor) -> int:
    """scales (num_blocks,) and codes (numel,) of v; `tree` as `compression.dynamic8` lays it out."""
    return int(
        required().pt_dynamic8_encode(
            *(x.data_ptr(), address(residual), block, tree.data_ptr()),
            *(scales.data_ptr(), codes.data_ptr(), x.numel()),
        )
    )


def add_dynamic8_(scales: Tensor, codes: Tensor, block: int, tree: Tensor, out: Tensor) -> None:
    """Add scale · number[code] to out."""
    status = required().pt_dynamic8_add(
        *(scales.data_ptr(), codes.data_ptr(), block, tree.data_ptr(), out.data_ptr(), out.numel())
    )
    assert status == 0, "the kernel refuses checked arguments"


def one_bit_(x: Tensor, residual: Residual, means: Tensor, words: Tensor, row_length: int) -> int:
    """means (num_rows, 2) and words (num_rows, words_per_row) of v's rows."""
    num_rows = x.numel() // row_length
    return int(
        required().pt_one_bit_encode(
            *(x.data_ptr(), address(residual), means.data_ptr(), words.data_ptr(), num_rows, row_length)
        )
    )


def add_one_bit_(means: Tensor, words: Tensor, out: Tensor, row_length: int) -> None:
    """Add the mean that each bit names to out."""
    num_rows = out.numel() // row_length
    required().pt_one_bit_add(means.data_ptr(), words.data_ptr(), out.data_ptr(), num_rows, row_length)


def sign_(x: Tensor, residual: Residual, scale: Residual, words: Tensor) -> int:
    """words of v, and its mean magnitude, where there is a place for it; else bits stand for ±1."""
    return int(
        required().pt_sign_encode(
            *(x.data_ptr(), address(residual), scale is not None, address(scale), words.data_ptr(), x.numel())
        )
    )


def address(tensor: Residual) -> int | None:
    """A tensor's address; None without a tensor."""
    return None if tensor is None else tensor.data_ptr()
