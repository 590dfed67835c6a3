"""A 64-bit hash of tensors' memory, at its bandwidth: equal bits have equal hashes, and a flip of any one bit shows.

words      x₀ x₁ x₂ …           the memory as 64-bit integers, the last one filled up with zeros
block      h = Σ wᵢ xᵢ + Σ vᵢ ⌊xᵢ / 2³²⌋  mod 2⁶⁴     wᵢ, vᵢ: odd, others for each place
tensors    d ← M d + h                          block after block; M is odd

One flipped bit b moves h by ±2ᵇ wᵢ, from b = 32 on by ±2ᵇ wᵢ ± 2ᵇ⁻³² vᵢ. That is never 0, as w and v are odd; and d
differs, too, as M is. Other changes escape with a probability of about 2⁻³³ if they touch nothing but top bits, else
2⁻⁶⁴. No secret is in it: it finds faults, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_MIXER = 0x2545F4914F6CDD1D
_BLOCK_WORDS = 32768
"""A block and its weights fit into the second-level cache."""
_SMALL_BYTES = 32768
"""Tensors up to here are put one behind the other first: a call of torch costs more than a copy."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> int:
    """The hash of strided tensors in their order, 0 to 2⁶⁴ - 1; strides do not count.

    Cost: reads each byte once, and a few microseconds a tensor; other tensors than contiguous ones are copied. Tensors
    on an accelerator are hashed there, with one wait at the end.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    hashes: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.nbytes <= _SMALL_BYTES:
            small.setdefault((flat.dtype, flat.device), []).append(flat)
        else:
            hashes += _hashes(flat)
    for group in small.values():
        hashes += _hashes(torch.cat(group))
    digest = len(hashes)
    for value in hashes:
        digest = (digest * _MULTIPLIER + int(value)) & _MASK
    return digest


def _hashes(flat: Tensor) -> list[Tensor]:
    words = _words(flat)
    weights, of_halves = _weights(words.device)
    found = []
    for begin in range(0, words.numel(), _BLOCK_WORDS):
        block = words[begin : begin + _BLOCK_WORDS]
        found.append(_dot(block, weights[: block.numel()]) + _dot(block >> 32, of_halves[: block.numel()]))
    return found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b) if a.device.type == "cpu" else (a * b).sum()  # CUDA has no dot of integers


def _words(flat: Tensor) -> Tensor:
    """The memory of a contiguous vector as 64-bit words, in place where it begins and ends with one."""
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    size = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    filled = torch.zeros(-(-flat.nbytes // 8) * 8, dtype=torch.uint8, device=flat.device)
    filled[: flat.nbytes] = flat.view(torch.uint8)
    return filled.view(torch.int64)


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd numbers without a pattern that data have: w and v."""
    mixed = torch.arange(1, 2 * _BLOCK_WORDS + 1, dtype=torch.int64) * (_MULTIPLIER - 2**64)
    mixed = (mixed ^ (mixed >> 29)) * _MIXER
    w, v = ((mixed ^ (mixed >> 32)) | 1).to(device).chunk(2)
    return w, v
