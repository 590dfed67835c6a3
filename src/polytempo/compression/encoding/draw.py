"""Draws that no rank has to send or to keep: each is a function of (seed, step, rank, tensor) and of the element.

    key    = splitmix64 over seed, step, rank, tensor                    64 bits
    draw i = lowbias32(i xor key's lower half), with the upper half between its two multiplications     32 bits

So an encoding can be repeated, and does not depend on threads, devices or instruction sets: the kernels
(native/codes_drawn.h) draw the same bits. Within one key draws do not repeat below 2^32 elements.

Source: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", 2014, figure 13
(splitmix64); C. Wellons, "Prospecting for hash functions", 2018 (lowbias32, the integer finalizer). Deviation: the
key's upper half between the multiplications, without which the streams of two keys would be permutations of one stream
by an xor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Encoding, Kernels
from polytempo.compression.encoding.values import flat_f32
from polytempo.core import EncodeContext
from polytempo.native.kernels import codes_dense

GRAIN_BITS = 30
"""Probabilities are rounded down to multiples of 2^-30: 1 always happens, 0 never."""

_ODD = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def draw_key(seed: int, when: EncodeContext) -> int:
    """64 bits for one encoding of one tensor."""
    key = 0
    for number in (seed, when.step, when.rank, when.tensor):
        key = _splitmix64(key ^ (number & _MASK_64))
    return _splitmix64(key ^ when.life) if when.life else key


def draws(key: int, count: int, device: torch.device, first: int = 0) -> Tensor:
    """The draws of elements first, first + 1, …: int64 of shape (count,), each below 2^32. The kernels' twin."""
    index = torch.arange(first, first + count, dtype=torch.int64, device=device)
    upper = finalized(index >> 32, 0) ^ (key >> 32)
    return finalized((index & _MASK) ^ (key & _MASK), upper)


def finalized(x: Tensor, between: Tensor | int) -> Tensor:
    """lowbias32 of 32-bit numbers that int64 holds. The products wrap around, but not their lower halves."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15) ^ between
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def happens(odds: Tensor, key: int) -> Tensor:
    """int64 of 0 and 1: element i is 1 with probability odds[i], a float32 of [0, 1]. Shape (count,)."""
    grains = (odds * 2.0**GRAIN_BITS).to(torch.int64)
    return (grains > draws(key, odds.numel(), odds.device) >> (32 - GRAIN_BITS)).to(torch.int64)


def _splitmix64(x: int) -> int:
    x = (x + _ODD) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def given_values(x: Tensor, residual: Tensor | None) -> Tensor:
    """The input of a kernel: with a residual x itself, which `encodes` has let in."""
    return flat_f32(x) if residual is None else x


def drawn_kernels(
    encode: Callable[..., Tensor], decode: Callable[..., None], fits: Callable[..., bool] = codes_dense.fits
) -> Kernels:
    """Kernels of a codec; `decode(encoding, wire, out, when, add=…)` adds to `out`, or writes over it.

    Without a residual they take other dtypes, too, as `given_values`.
    """

    def encodes(x: Tensor, residual: Tensor | None = None) -> bool:
        return x.numel() > 0 and fits(x.new_empty(1, dtype=torch.float32)) if residual is None else fits(x, residual)

    def add_(encoding: Encoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
        decode(encoding, wire, out, when, add=True)

    def decoded(encoding: Encoding, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        out = torch.empty_like(like)
        decode(encoding, wire, out, when, add=False)
        return out

    return Kernels(fits, add_, decoded, encodes, encode)
