"""A 64-bit hash of tensors' memory, at its bandwidth: equal bits have equal hashes, and a flip of any one bit shows.

words      x₀ x₁ x₂ …           the memory as 64-bit integers, the last one filled up with zeros
block      h = Σ wᵢ xᵢ + C Σ lᵢ  mod 2⁶⁴     wᵢ: odd, another for each place; lᵢ: the words' signed halves
tensors    d ← M d + h                      block after block; M is odd

One flipped bit moves h by ±2ᵇ wᵢ ± 2ᶜ C with b - c of 0 or 32, which is never 0 as w is odd and C twice an odd number;
and M is odd, so d differs, too. Other changes escape with a probability of about 2⁻⁶⁴. Without the second sum two
flips of top bits would cancel, as a change of sign of float64 is. No secret is in it: it finds faults, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_OF_HALVES = 2 * 0x2545F4914F6CDD1D
_BLOCK_WORDS = 32768
"""A block and its weights fit into the second-level cache."""
_SMALL_BYTES = 32768
"""Tensors up to here are put one behind the other first: a call of torch costs more than a copy."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> int:
    """The hash of strided tensors in their order, 0 to 2⁶⁴ - 1; strides do not count.

    Cost: reads each byte once, and a few microseconds a tensor; what is not contiguous is copied. Tensors on an
    accelerator are hashed there, with one wait at the end.
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


def combined(parts: Iterable[int]) -> int:
    """One hash of several, in their order."""
    digest = 0
    for part in parts:
        digest = (digest * _MULTIPLIER + part) & _MASK
    return digest


def _hashes(flat: Tensor) -> list[Tensor]:
    words = _words(flat)
    weights = _weights(words.device)
    halves = words.view(torch.int32)
    found = []
    for begin in range(0, words.numel(), _BLOCK_WORDS):
        block = words[begin : begin + _BLOCK_WORDS]
        of_halves = halves[2 * begin : 2 * (begin + _BLOCK_WORDS)].sum()
        used = weights[: block.numel()]
        product = torch.dot(block, used) if block.device.type == "cpu" else (block * used).sum()
        found.append(product.add(of_halves, alpha=_signed(_OF_HALVES)))
    return found


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
def _weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern that data have."""
    mixed = torch.arange(1, _BLOCK_WORDS + 1, dtype=torch.int64) * _signed(_MULTIPLIER)
    mixed = (mixed ^ (mixed >> 29)) * _signed(_OF_HALVES + 1)
    return ((mixed ^ (mixed >> 32)) | 1).to(device)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
