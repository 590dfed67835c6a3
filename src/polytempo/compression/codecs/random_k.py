"""k elements drawn by chance, the same on all ranks, so that their values may be added on the way.

No message says which: every rank draws them from (seed, step, tensor).

Source: S. U. Stich et al., "Sparsified SGD with memory", 2018, Definition 2.1; the shared seed: J. Konečný et al.,
"Federated learning: strategies for improving communication efficiency", 2016, section 2 ("random mask").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, Entries, WireSize
from polytempo.compression.encoding.values import check_finite, whole
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real, check_whole


def random_k(ratio: float = 0.01, unbiased: bool = False, seed: int = 0) -> Coded:
    """k = max(1, ⌈ratio · n⌉) elements that chance draws, the same on all ranks.

        wire    | k values in the dtype of the tensor |           k · itemsize bytes, fixed

    The indices are a pure function of (seed, `when.step`, `when.tensor`, n), not of the rank: wires are `summable`, and
    decoding needs the `when` of encoding. Each element is drawn with probability k/n (see `drawn`;
    the 32 bits that draw within a stratum are off by less than m / 2^32). Choices of different elements are not
    independent, as they are not in Stich et al., who draw among all sets of k; both laws need only each element's own
    probability.

    unbiased=False: x̂ has the values. Law: contraction k/n, in expectation; use it with `feedback`.
    unbiased=True: x̂ has n/k times the values (scaled when decoded, so wires of 16 bits do not overflow more easily).
    Law: E x̂ = x, E‖x̂ - x‖² = (n/k - 1)‖x‖², unless n/k · |x| is beyond the dtype's range: then x̂ is its largest number.
    With feedback it diverges; use it without.

    An all-reduce of 16-bit tensors adds in 16 bits, as with `exact`: feedback does not keep that rounding's error, and
    sums may become infinite. `route=pt.compression.all_gather` adds in float32.

    Raises ValueError for a ratio not in (0, 1]; before anything has changed also where n/k is 2^31 or more, and
    NotFinite for NaN and infinities.
    """
    check_real(ratio=ratio)
    check_whole(seed=seed)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is a share of the elements, over 0 and at most 1, got {ratio}")
    return Coded(RandomK(ratio, unbiased, seed))


@dataclass(frozen=True)
class RandomK:
    """See `random_k`."""

    ratio: float
    unbiased: bool
    seed: int

    @cached_property
    def facts(self) -> Facts:
        """Each element is drawn with probability k/n."""
        law = Law("contraction", lambda like: 1 / self._scale(like))
        if self.unbiased:
            law = Law("unbiased", lambda like: self._scale(like) - 1)
        name = codec_name(random_k, self, brief=("unbiased", "seed"))
        return Facts(name, law, flops=2.0, summable=True, sparse=True, draws=True)

    def num_sent(self, like: Tensor) -> int:
        """k."""
        return min(max(1, math.ceil(self.ratio * like.numel())), like.numel())

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """The size of k values: every rank knows the indices."""
        return WireSize(self.num_sent(like) * like.element_size(), like.dtype)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """The values drawn. Refuses NaN and infinities in all of x, drawn or not."""
        check_finite(self.facts.name, x)
        return x.reshape(-1)[self.drawn(x, when)]

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Entries:
        """The values, or n/k times as much, at the places that `when` says."""
        values = whole(self.facts.name, wire, like, self.num_sent(like), like.dtype)
        if self.unbiased:
            most = torch.finfo(wire.dtype).max
            values = (values * self._scale(like)).clamp_(-most, most)
        return Entries(self.drawn(like, when), values)

    def drawn(self, like: Tensor, when: EncodeContext) -> Tensor:
        """The k indices (int64) for that tensor and step."""
        return drawn(self.facts.name, like, self.num_sent(like), self.seed, when.step, when.tensor)

    def _scale(self, like: Tensor) -> float:
        """n/k."""
        return like.numel() / max(self.num_sent(like), 1) if like.numel() else 1.0


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
    Σ over strata of m/n · 1/m = k/n, exactly, for all n and k. Cost: O(k). Raises ValueError for strata of 2^31
    places or more, because 32 bits would draw some only.
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
    """Shift to the right, with zeros from the left."""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)
