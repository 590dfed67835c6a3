"""k of n places, drawn without a message: the same on all ranks. See `random_k`."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_PLACES = 2**31
"""So many times 32 bits are beyond int64."""
_LARGEST = 2**63 - 1


def drawn(codec: str, like: Tensor, k: int, seed: int, step: int, tensor: int) -> Tensor:
    """The k indices (int64) for that tensor and step: distinct, and ascending but for one place.

    [0, n) is cut into k strata of ⌊n/k⌋ or ⌈n/k⌉ places, one place is drawn in each, and all are moved round by one
    number s drawn from [0, n):

        n = 8, k = 3     [ . x | . . x | x . . ]   s = 3   ▶   [ . x x . . . . x ] moved by 3

    An element i is then in a stratum of m places with probability m/n for each stratum, and drawn from it with 1/m:
    Σ over strata of m/n · 1/m = k/n, exactly, whatever n and k. Cost: O(k). Raises ValueError for strata of 2^31
    places or more, of which 32 bits would draw some only.
    """
    n = like.numel()
    whole, rest = divmod(n, max(k, 1))
    if whole + (rest > 0) >= _PLACES or k * rest > _LARGEST:
        raise ValueError(f"{codec} cannot draw {k} of {n} elements in int64; take a larger ratio, or split them")
    key = _GOLDEN
    for part in (seed, step, tensor, n):
        key = _mixed((key ^ (part & _MASK)) * _GOLDEN + _GOLDEN & _MASK)
    stratum = torch.arange(k + 1, dtype=torch.int64, device=like.device)
    edges = stratum * whole + stratum * rest // max(k, 1)  # stratum · n might overflow
    chance = _mixed_all(torch.arange(1, k + 1, dtype=torch.int64, device=like.device), key)
    within = (chance * edges.diff()) >> 32
    return (edges[:-1] + within + (_mixed(key) * n >> 64)) % max(n, 1)


def _mixed(z: int) -> int:
    """The finalizer of splitmix64 (S. Vigna, 2015): every bit of 64 depends on every other."""
    z = (z ^ z >> _SHIFTS[0]) * _MULTIPLIERS[0] & _MASK
    z = (z ^ z >> _SHIFTS[1]) * _MULTIPLIERS[1] & _MASK
    return z ^ z >> _SHIFTS[2]


def _mixed_all(counters: Tensor, key: int) -> Tensor:
    """The upper 32 bits of `_mixed(key + counter · golden ratio)`; int64 wraps around as it should."""
    z = counters * _signed(_GOLDEN) + _signed(key)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z = (z ^ _shifted(z, shift)) * _signed(multiplier)
    return _shifted(z ^ _shifted(z, _SHIFTS[2]), 32)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)
