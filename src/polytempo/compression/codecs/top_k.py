"""The k elements of the largest magnitude, and where they are.

Source: A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", 2017; S. U. Stich et al.,
"Sparsified SGD with memory", 2018, Definition 2.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding import entropy as zstd
from polytempo.compression.encoding.coded import Coded, Entries, WireSize
from polytempo.compression.encoding.values import check_finite
from polytempo.compression.kernels.sparse import TOP_K
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real

_HEADER_BYTES = 4


def top_k(ratio: float = 0.01, entropy: bool = False) -> Coded:
    """The k = max(1, ⌈ratio · n⌉) elements of the largest |v|; of equal ones, those of the lowest index.

        wire           | k indices (int32, ascending) | k values in the dtype of the tensor |
        with entropy   | bytes of the next (0: as above) | zstd of the indices' differences, or they | k values |

    Exactly the k largest, whatever the path: the kernel guesses a threshold from a sample, collects in one pass what is
    above it, and selects among that; where the guess was wrong it counts by radix first. All instruction sets and
    torch give the same wire. Bytes: k · (4 + itemsize), fixed; 8 for a float32, so 2 % of the tensor at ratio 0.01.
    entropy=True (the extra `polytempo[zstd]`) brings indices of random places from 4 bytes to a little over 1 at 1 %,
    and wires are not `fixed`; 4 bytes more are the most. In wires of two bytes a value the end is padded to 4.

    Law: contraction k/n (Stich et al., Lemma A.1). Without `feedback` what is small is never sent. Cost with a
    residual: both are read twice, and r written once.

    Raises ValueError for a ratio not in (0, 1] and for tensors of 2^31 elements or more, ImportError where zstandard is
    missing, and NotFinite, before anything has changed, for NaN and infinities.
    """
    check_real(ratio=ratio)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is a share of the elements, over 0 and at most 1, got {ratio}")
    if entropy:
        zstd.library()  # who asks for it without having it learns so at once, not at the first step
    return Coded(TopK(ratio, entropy), TOP_K)


@dataclass(frozen=True)
class TopK:
    """See `top_k`."""

    ratio: float
    entropy: bool

    @cached_property
    def facts(self) -> Facts:
        """The k largest of n have at least k/n of the sum of squares."""
        name = codec_name(top_k, self, brief=("entropy",))
        law = Law("contraction", lambda like: self.num_sent(like) / max(like.numel(), 1))
        return Facts(name, law, flops=4.0, sparse=True, fixed=not self.entropy)

    def num_sent(self, like: Tensor) -> int:
        """k."""
        return min(max(1, math.ceil(self.ratio * like.numel())), like.numel())

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """The k largest: where they are, and what."""
        entries.check_count(self.facts.name, x.numel())
        check_finite(self.facts.name, x)
        v, k = x.reshape(-1), self.num_sent(x)
        indices = entries.largest(v, k) if k else torch.empty(0, dtype=torch.int64, device=x.device)
        plain = torch.zeros(self.plain_bytes(x), dtype=torch.uint8, device=x.device)
        entries.put(plain, entries.put(plain, 0, indices.to(torch.int32)), v[indices])
        return self.sent(plain, x)

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Entries:
        """The values at their places."""
        start, end, length = self.opened(wire, like)
        k = self.num_sent(like)
        if length:
            indices = zstd.unpacked(wire[start : start + length], k).to(like.device)
        else:
            indices = entries.taken(wire, start, k, torch.int32).long()
        return Entries(indices, entries.taken(wire, end, k, like.dtype))

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """Of k indices and k values; with entropy 4 more, the most: what zstd does not shorten stays as it is."""
        entries.check_count(self.facts.name, like.numel())
        return WireSize(_HEADER_BYTES * self.entropy + self.plain_bytes(like))

    def plain_bytes(self, like: Tensor) -> int:
        """Of the wire before its indices are compressed."""
        k = self.num_sent(like)
        return 4 * k + entries.padded(k * like.element_size())

    def sent(self, plain: Tensor, x: Tensor) -> Tensor:
        """The wire made of the plain one."""
        k = self.num_sent(x)
        if not self.entropy:
            return plain
        raw = zstd.packed(entries.taken(plain, 0, k, torch.int32)) if k else plain
        shorter = 0 < entries.padded(raw.numel()) < 4 * k
        head = entries.padded(raw.numel()) if shorter else 4 * k
        wire = torch.zeros(_HEADER_BYTES + head + plain.numel() - 4 * k, dtype=torch.uint8, device=x.device)
        entries.put_header(wire, "<I", raw.numel() if shorter else 0)
        entries.put(wire, _HEADER_BYTES, raw if shorter else plain[: 4 * k])
        entries.put(wire, _HEADER_BYTES + head, plain[4 * k :])
        return wire

    def opened(self, wire: Tensor, like: Tensor) -> tuple[int, int, int]:
        """Where indices and values begin on a wire, and bytes of compressed indices (0: they are not). ValueError."""
        entries.check_wire(self.facts.name, wire, like)
        k, start, length = self.num_sent(like), 0, 0
        if self.entropy:
            length, start = int(entries.header(wire, "<I", self.facts.name)[0]), _HEADER_BYTES
        end = start + (entries.padded(length) if length else 4 * k)
        if wire.numel() < end + k * like.element_size():
            raise ValueError(
                f"a wire of {self.facts.name} for {like.numel()} elements has {wire.numel()} bytes: too few"
            )
        return start, end, length
