"""Kernels on flat tensors of one process: an optimizer's step, and a search for NaN and infinities."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.native.call import DTYPES
from polytempo.native.kernels.step import Hyper
from polytempo.native.library import load, required

DTYPES_UPDATED = (torch.float32, torch.float64)
"""The dtypes that the kernel of `Updater` supports."""
DTYPES_CHECKED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def unfinite(values: Tensor) -> int:
    """The index of the first element that is NaN or infinite, -1 if all are finite. Reads a flat tensor once."""
    index: int = required().pt_unfinite(DTYPES[values.dtype], values.data_ptr(), values.numel())
    assert index >= -1, f"no kernel for {values.dtype}"
    return index


def squares(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(Σ a², Σ b²) of two flat, contiguous tensors of one length and dtype, added up in f64. Reads each once."""
    sums = (ctypes.c_double * 2)()
    status = required().pt_squares(DTYPES[a.dtype], a.data_ptr(), b.data_ptr(), ctypes.addressof(sums), a.numel())
    assert status == 0, f"no kernel for {a.dtype}"
    return sums[0], sums[1]


def lamb_direction_(
    hyper: Hyper, gradient: Tensor, weights: Tensor, first: Tensor, second: Tensor, out: Tensor
) -> tuple[float, float]:
    """LAMB's moments change in place; out ← u = m̂ / (√v̂ + ε) + λ w; answers (Σ w², Σ u²).

    All are flat, contiguous, of one length and dtype; none overlap. Cost: one pass over memory.
    """
    sums = (ctypes.c_double * 2)()
    status = required().pt_lamb_direction(
        *(DTYPES[weights.dtype], ctypes.addressof(hyper)),
        *(each.data_ptr() for each in (gradient, weights, first, second, out)),
        *(ctypes.addressof(sums), weights.numel()),
    )
    assert status == 0, f"no kernel for {weights.dtype}"
    return sums[0], sums[1]


class Updater:
    """One optimizer's steps by the kernel `pt::update` (native/kernels.h): in f64 inside, rounded once at the end.

    `hyper` has the optimizer's rule and numbers; its `lr`, `step` and `first` may be changed between steps.
    """

    def __init__(self, hyper: Hyper, dtype: torch.dtype) -> None:
        if dtype not in DTYPES_UPDATED:
            raise ValueError(f"the native update is for {DTYPES_UPDATED}, not for {dtype}; use native=False")
        self.hyper = hyper
        self._function = required().pt_update
        self._descend = required().pt_descend
        self._code = DTYPES[dtype]
        self._float = ctypes.c_float if dtype is torch.float32 else ctypes.c_double
        self._hyper_address = ctypes.addressof(hyper)
        self._terms: dict[int, tuple[Any, Any, int]] = {}

    def update_(
        self,
        gradients: Sequence[Tensor],
        scales: Sequence[float],
        weights: Tensor,
        out: Tensor,
        first: Tensor | None = None,
        second: Tensor | None = None,
    ) -> None:
        """Put weights after one step on g = Σ scales[i] · gradients[i] into out; moments change in place.

        All are flat, contiguous, of one length. `out` may be `weights`, else they must not overlap. Scales are rounded
        to the tensors' dtype. Cost: one pass over memory, for any number of gradients.
        """
        pointers, factors, address = self._arrays(len(gradients))
        for i, gradient in enumerate(gradients):
            pointers[i] = gradient.data_ptr()
            factors[i] = scales[i]
        m = None if first is None else first.data_ptr()
        v = None if second is None else second.data_ptr()
        status = self._function(
            *(self._code, self._hyper_address, pointers, address, len(gradients)),
            *(weights.data_ptr(), m, v, out.data_ptr(), m, v, weights.numel()),
        )
        assert status == 0, "the kernel refuses checked arguments"

    def descend_(self, gradient: Tensor, scale: float, weights: Tensor, out: Tensor) -> int:
        """Step by one gradient, for SGD without momentum, looking at it on the way; `out` is not `weights`.

        Returns -1, or the index of the gradient's first element that is NaN or infinite; then `out` is of no use.
        Cost: as `update_`; on a large gradient the check costs nothing, for memory is the limit.
        """
        index: int = self._descend(
            *(self._code, self._hyper_address, gradient.data_ptr(), scale),
            *(weights.data_ptr(), out.data_ptr(), weights.numel()),
        )
        assert index >= -1, "the kernel refuses checked arguments"
        return index

    def _arrays(self, count: int) -> tuple[Any, Any, int]:
        """Arrays for the addresses and scales of `count` gradients, made once."""
        found = self._terms.get(count)
        if found is None:
            factors = (self._float * count)()
            found = self._terms[count] = (ctypes.c_void_p * count)(), factors, ctypes.addressof(factors)
        return found


_WORTH_BYTES = 1 << 20


def copy_(out: Tensor, source: Tensor) -> None:
    """Copy source to out, which do not overlap; of one shape.

    Large copies go past the caches, so that `out` is not read before it is overwritten: two thirds of the time. Where
    that is impossible, torch copies.
    """
    num_bytes = source.numel() * source.element_size()
    library = load() if num_bytes >= _WORTH_BYTES else None
    alike = out.dtype is source.dtype and out.shape == source.shape and out.device == source.device
    if library is None or not alike or source.device.type != "cpu" or not _is_plain(out) or not _is_plain(source):
        out.copy_(source)
        return
    library.pt_copy(out.data_ptr(), source.data_ptr(), num_bytes)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()
