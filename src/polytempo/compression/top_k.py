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

from polytempo.compression import entries, entropy
from polytempo.compression.values import check_kind
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_real
from polytempo.native import codes_sparse

_HEADER_BYTES = 4


@dataclass(frozen=True)
class TopK:
    """See `top_k`."""

    ratio: float
    entropy: bool
    summable: bool = False
    sparse: bool = True
    passes_nonfinite: bool = False
    flops: float = 4.0

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(top_k, self, brief=("entropy",))

    @property
    def law(self) -> Law:
        """The k largest of n have at least k/n of the sum of squares."""
        return Law("contraction", lambda like: self.num_sent(like) / max(like.numel(), 1))

    @property
    def fixed(self) -> bool:
        """Unless indices are compressed."""
        return not self.entropy

    def num_sent(self, like: Tensor) -> int:
        """k."""
        return min(max(1, math.ceil(self.ratio * like.numel())), like.numel())

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """Of k indices and k values; with entropy 4 more, the most: what zstd does not shorten stays as it is."""
        k = self.num_sent(like)
        return _HEADER_BYTES * self.entropy + 4 * k + entries.padded(k * like.element_size())

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The k largest of x. Reads x once, most often."""
        check_kind(x)
        x = x.detach()
        entries.check_count(self.name, x.numel())
        if codes_sparse.serves(x):
            return self._sent(self._found(codes_sparse.SourceArrays(x), x, out), x, out), state
        v = x.reshape(-1)
        return self._sent(self._picked(v, out), x, out), state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """The k largest of v = x + residual; residual ← v, and 0 where sent. Reads both twice, writes it once."""
        check_kind(x)
        x, k = x.detach(), self.num_sent(x)
        entries.check_count(self.name, x.numel())
        if codes_sparse.serves(x, residual):
            plain = self._found(codes_sparse.SourceArrays(x, residual), x, out)
            wire = self._sent(plain, x, out)  # which may not fit into out; so before anything changes
            residual.add_(x)
            codes_sparse.zero(residual, plain, k)
        else:
            v = (x + residual).reshape(-1)
            plain = self._picked(v, out)
            wire = self._sent(plain, x, out)
            v[entries.taken(plain, 0, k, torch.int32).long()] = 0
            residual.copy_(v.view(residual.shape))
        return wire, state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """The values at their places, 0 elsewhere."""
        out = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self.add_(wire, out, when)
        return out

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out[indices] += values. Raises ValueError, and adds nothing, for a wire that no such tensor has."""
        entries.check_wire(self.name, wire, out)
        k = self.num_sent(out)
        packed, start = False, 0
        if self.entropy:
            (length,) = entries.header(wire, "<I", self.name)
            packed, start = length > 0, _HEADER_BYTES
        end = start + (entries.padded(int(length)) if packed else 4 * k)
        if wire.numel() < end + k * out.element_size():
            raise ValueError(f"a wire of {self.name} for {out.numel()} elements has {wire.numel()} bytes: too few")
        if not packed and codes_sparse.serves(out):
            if not codes_sparse.add_entries(out, wire[start:], wire[end:], k):
                raise ValueError(f"a wire of {self.name} has an index beyond the tensor's {out.numel()} elements")
            return
        if packed:
            indices = entropy.unpacked(wire[start : start + int(length)], k).to(out.device)
        else:
            indices = entries.taken(wire, start, k, torch.int32).long()
        entries.add_at_(out, indices, entries.taken(wire, end, k, out.dtype), self.name)

    def _found(self, source: codes_sparse.SourceArrays, x: Tensor, out: Tensor | None) -> Tensor:
        """The plain wire, by the kernel."""
        plain = self._plain(x, out)
        bad = source.top(self.num_sent(x), plain).bad
        if bad >= 0:
            entries.refuse(self.name, bad, x if source.residual is None else x + source.residual)
        return plain

    def _picked(self, v: Tensor, out: Tensor | None) -> Tensor:
        """The plain wire, by torch."""
        entries.check_finite(self.name, v)
        plain, k = self._plain(v, out), self.num_sent(v)
        if k:
            indices = entries.largest(v, k)
            end = entries.put(plain, 0, indices.to(torch.int32))
            plain[entries.put(plain, end, v[indices]) :] = 0
        return plain

    def _plain(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Memory for k indices and k values: the wire itself, unless it is going to be compressed."""
        k = self.num_sent(x)
        num_bytes = 4 * k + entries.padded(k * x.element_size())
        return entries.room(None if self.entropy else out, num_bytes, x.device)

    def _sent(self, plain: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        """The wire made of the plain one."""
        if not self.entropy:
            return plain
        k = self.num_sent(x)
        raw = entropy.packed(entries.taken(plain, 0, k, torch.int32)) if k else plain
        shorter = 0 < entries.padded(raw.numel()) < 4 * k
        head = entries.padded(raw.numel()) if shorter else 4 * k
        wire = entries.room(out, _HEADER_BYTES + head + plain.numel() - 4 * k, x.device)
        entries.put_header(wire, "<I", raw.numel() if shorter else 0)
        end = entries.put(wire, _HEADER_BYTES, raw if shorter else plain[: 4 * k])
        wire[end : _HEADER_BYTES + head] = 0
        entries.put(wire, _HEADER_BYTES + head, plain[4 * k :])
        return wire


def top_k(ratio: float = 0.01, entropy: bool = False) -> TopK:
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
        _check_library()
    return TopK(ratio, entropy)


def _check_library() -> None:
    """Who asks for it without having it learns so at once, not at the first step."""
    entropy.library()
