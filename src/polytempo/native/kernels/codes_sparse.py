"""Kernels of the codecs that send a few elements: the Python interface of `native/codes_sparse.cpp`.

Their twins are the torch versions of `compression`: `threshold`, `top_k`, `dgc`, and `entries`, which they share.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.native.kernels.codes_dense import address, fits
from polytempo.native.library import required

_MOST = 2**31
_ENTRY_BYTES = 8


class _Source(ctypes.Structure):
    """`pt_sparse_source` of native/codes_sparse_abi.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "r", "u")),
        *((name, ctypes.c_float) for name in ("momentum", "scale")),
    )


class Looked(NamedTuple):
    """The result of a pass over a source."""

    num_found: int
    bad: int
    """The first element that is NaN or infinite, -1: there is none. Otherwise nothing else is to be used."""


class SourceArrays(NamedTuple):
    """v = x; v = x + residual; or, with a velocity, v = residual + (momentum · velocity + scale · x)."""

    x: Tensor
    residual: Tensor | None = None
    velocity: Tensor | None = None
    momentum: float = 0.0
    scale: float = 1.0

    def count_over(self, cut: float) -> Looked:
        """The number of |v| > cut. One pass, and nothing is written."""
        bad = ctypes.c_int64()
        count = required().pt_sparse_count(self._structure(), cut, self.x.numel(), ctypes.byref(bad))
        return Looked(count, bad.value)

    def above(self, cut: float, indices: Tensor, values: Tensor) -> Looked:
        """The number of |v| >= cut (and > 0); as many of them as there is room for, indices (int32) ascending."""
        bad = ctypes.c_int64()
        count = required().pt_sparse_above(
            *(self._structure(), cut, self.x.numel(), indices.data_ptr(), values.data_ptr(), indices.numel()),
            ctypes.byref(bad),
        )
        return Looked(count, bad.value)

    def top(self, k: int, wire: Tensor) -> Looked:
        """The k largest |v|, of equal ones the first: k indices (int32, ascending), then k values, as bytes of `wire`.

        Exact. One pass over the source where a sample of 65,536 elements guesses the threshold well, which is nearly
        always; otherwise five. Memory: 16 bytes for each of the k.
        """
        room = 2 * k + 4096
        scratch = torch.empty(_ENTRY_BYTES * room, dtype=torch.uint8)
        bad = ctypes.c_int64()
        required().pt_sparse_top(
            *(self._structure(), self.x.numel(), k, wire.data_ptr(), wire.data_ptr() + 4 * k),
            *(scratch.data_ptr(), room, ctypes.byref(bad)),
        )
        return Looked(k, bad.value)

    def _structure(self) -> Any:
        return ctypes.byref(_Source(*map(address, self[:3]), self.momentum, self.scale))


def chunk_top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest |v| of each row of `values` (rows, size), float32; of equal ones the first. Four passes.

    Returns their places within the row (int64, ascending) and the values, both (rows, k).
    """
    rows, size = values.shape
    assert values.is_contiguous()
    assert 0 < k <= size
    places, chosen = (torch.empty(rows, k, dtype=dtype) for dtype in (torch.int64, torch.float32))
    required().pt_sparse_chunk_top(values.data_ptr(), rows, size, k, places.data_ptr(), chosen.data_ptr())
    return places, chosen


def serves(*tensors: Tensor) -> bool:
    """True if there are kernels for these: they fit, and have 1 to 2^31 - 1 elements."""
    return 0 < tensors[0].numel() < _MOST and fits(*tensors)


def pack_threshold(x: Tensor, residual: Tensor | None, tau: float, is_map: bool, words: Tensor) -> None:
    """Strom's codes of v = x + residual (finite) into the bytes `words`; residual ← v - the sent values. One pass."""
    required().pt_threshold_pack(x.data_ptr(), address(residual), tau, x.numel(), is_map, words.data_ptr())


def add_threshold(out: Tensor, words: Tensor, tau: float, is_map: bool) -> bool:
    """Add the entries of the words (bytes, 4 each) to out; False, and nothing is added, where one is impossible."""
    status: int = required().pt_threshold_add(
        out.data_ptr(), out.numel(), words.data_ptr(), words.numel() // 4, tau, is_map
    )
    return status == 0


def add_entries(out: Tensor, indices: Tensor, values: Tensor, count: int) -> bool:
    """Add values to out[indices], both given as bytes at any address; False, and nothing is added, where one is
    beyond."""
    assert min(indices.nbytes, values.nbytes) >= 4 * count, "the caller has measured the wire"
    status: int = required().pt_sparse_add(out.data_ptr(), out.numel(), indices.data_ptr(), values.data_ptr(), count)
    return status == 0


def zero(data: Tensor, indices: Tensor, count: int) -> None:
    """data[indices] = 0, for indices (int32, or their bytes) that a `SourceArrays` has found."""
    required().pt_sparse_zero(data.data_ptr(), indices.data_ptr(), count)


def accumulate(x: Tensor, velocity: Tensor, total: Tensor, momentum: float, scale: float) -> None:
    """velocity ← momentum · velocity + scale · x; total ← total + velocity. One pass."""
    required().pt_sparse_accumulate(x.data_ptr(), velocity.data_ptr(), total.data_ptr(), momentum, scale, x.numel())
