"""Classes of elements, with a mean for each class: the two signs of each row, or bins around a tensor's mean.

Sources: for signs F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs", 2014, section 3; and the authors' CNTK, for the threshold 0 and the means.
For bins A. Sarfi, B. Thérien, J. Lidin and E. Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
2025, and the released code; for whole tensors in 2 bits B. Thérien et al., "MuLoCo: Muon is a practical inner optimizer
for DiLoCo", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import Coded, Kernels, WireSize, from_zeros, room_for
from polytempo.compression.encoding.fields import (
    bits_loss,
    dense_fields,
    num_words,
    packed,
    packed_bits,
    to_float,
    unpacked,
    unpacked_bits,
    words_per_row,
)
from polytempo.compression.encoding.values import check_finite, computed, opened, refuse
from polytempo.compression.kernels import on_device
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.core.state import narrowed, wide
from polytempo.native.kernels import codes_dense

_SHORTEST_ROW = 4
"""A row takes 12 bytes at least, so shorter ones would grow."""
_MOST_BITS = 8
_DEVIATIONS = 6
"""The bins' width in all, in standard deviations."""


def one_bit() -> Coded:
    """bit = (v ≥ 0); x̂ = the mean of the row's entries of v with the same bit. To be used with `feedback`.

        wire  [ for each row: mean of its negative entries, mean of the others: float32 | for each row: its bits ]

    Bit j % 32 of word j / 32 is the row's element j; rows begin with a new word, filled up with 0. A class without
    entries has mean 0. Rows are v's as [shape[0], rest]; a vector is one row, and so is a tensor with rows of fewer
    than 4 elements, because it would grow.

    Cost: 1 bit an element and 8 bytes a row. With the native core one pass over memory, row by row, where a row fits
    into the cache (two for longer rows), and with a residual one more over x. Sums are in float64.

    Law: with n the length of a row, ‖x - x̂‖² ≤ (1 - 1/n) ‖x‖². For x̂ is x's projection on two classes, so
    ‖x̂‖² = Σ ‖class‖₁² / size ≥ Σ ‖class‖² / n. One large element among zeros meets the bound; the
    error for normal x is 0.36 ‖x‖².
    Below 1.2e-38 (6.1e-5 in float16) the means themselves round, and it does not hold.

    Deviations: the paper's groups are a matrix's columns, which CNTK stores one behind the other, as torch does rows.
    Only 1 bit. A sum is quantised again by `through(feedback(one_bit()))`, with a residual of its own.
    Raises NotFinite for NaN and infinities, with everything as it was (if the residual itself is not finite, or so
    large that it overflows with a small x, earlier rows of it may have been encoded).
    """
    return Coded(OneBit(), _KERNELS)


@dataclass(frozen=True)
class OneBit:
    """See `one_bit`."""

    @cached_property
    def facts(self) -> Facts:
        """See `one_bit` for the proof of the bound."""
        bound = Law("contraction", lambda like: 1 - bits_loss(self.row_length(like), like))
        return Facts("one_bit()", bound, flops=5.0)

    def row_length(self, like: Tensor) -> int:
        """The length of the rows [shape[0], rest]. Vectors, and matrices with rows that would grow, are one row."""
        if not like.numel():
            return 1
        rest = like.numel() // like.shape[0] if like.dim() > 1 else like.numel()
        return rest if rest >= _SHORTEST_ROW else like.numel()

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """8 bytes a row, and 4 for every 32 elements of it."""
        length = self.row_length(like)
        return WireSize(like.numel() // length * (8 + 4 * words_per_row(length)))

    def parts(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Means and words."""
        end = 8 * (like.numel() // self.row_length(like))
        wire = opened("one_bit()", self.size(like).num_bytes, like, wire, torch.uint8)
        return wire[:end].view(torch.float32), wire[end:]

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Signs and means."""
        check_finite("one_bit()", x)
        rows = computed(x).view(-1, self.row_length(x))
        positive = rows >= 0
        wide, count = rows.double(), positive.sum(1)
        ups = torch.where(positive, wide, 0).sum(1) / count.clamp(min=1)
        downs = torch.where(positive, 0, wide).sum(1) / (rows.shape[1] - count).clamp(min=1)
        means = to_float(torch.stack([downs, ups], 1)).view(-1).view(torch.uint8)
        return torch.cat([means, packed_bits(positive).view(-1)])

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """The mean that each bit names."""
        means, words = self.parts(wire, like)
        pairs = means.view(-1, 2)
        bits = unpacked_bits(words, len(pairs), self.row_length(like))
        return torch.where(bits, pairs[:, 1:], pairs[:, :1]).view(like.shape).to(like.dtype)


def _kernels(of: ModuleType) -> Kernels:
    """The kernels that a module has."""

    def encode(encoding: OneBit, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
        wire = room_for(encoding, x, out)
        means, words = encoding.parts(wire, x)
        refuse(encoding.facts.name, of.one_bit_(x, residual, means, words, encoding.row_length(x)), x, residual)
        return wire

    def add_(encoding: OneBit, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
        of.add_one_bit_(*encoding.parts(wire, out), out, encoding.row_length(out))

    return Kernels(of.fits, add_, from_zeros(add_), of.fits, encode)


_KERNELS = _kernels(codes_dense).or_else(_kernels(on_device))


def bins(bits: int = 2) -> Coded:
    """code = ⌊(v - μ) / w⌋ for bins of w = 6σ / 2^bits, with μ and σ the tensor's; x̂ = the mean of v's bin.

        wire  [ a mean for each bin: float32, or float64 of float64 | codes, `bits` each (`encoding.fields`) ]

    The outermost bins also have all elements outside of μ ± 3σ. Use it with `feedback`.

    Bytes: `bits` an element, and a table of 2^bits numbers: a tensor of float32 becomes 1/16 of it with 2 bits. Small
    tensors, which this would make larger, travel as they are.
    Law: with n elements, ‖x - x̂‖² ≤ (1 - 1/n) ‖x‖². For x̂ is x's projection on bins with an edge at μ, so that no bin
    has elements on both sides, and ‖x̂‖² ≥ n μ² + ‖x - μ‖₁² / n. The error for normal x is 0.16 ‖x‖² with 2 bits and
    0.012 with 4. Below float32's normal numbers the means themselves round, and it does not hold.
    Cost: 2^bits and some more passes in float64, by torch. Ranks decode the same numbers on every processor.
    Errors: ValueError for bits not from 1 to 8; NotFinite for NaN and infinities.
    """
    check_whole(bits=bits)
    if not 1 <= bits <= _MOST_BITS:
        raise ValueError(f"bits are from 1 to {_MOST_BITS}, got {bits}")
    return Coded(Bins(bits))


@dataclass(frozen=True)
class Bins:
    """See `bins`."""

    bits: int

    @cached_property
    def facts(self) -> Facts:
        """See `bins` for the proof of the bound."""
        bound = Law("contraction", lambda like: 1 - bits_loss(like.numel(), like))
        return Facts(codec_name(bins, self), bound, flops=24.0)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """`bits` an element, and the table; or the tensor."""
        return WireSize(min(self._coded_bytes(like), entries.padded(like.numel() * like.itemsize)))

    def _coded_bytes(self, like: Tensor) -> int:
        table: int = 2**self.bits * wide(like.dtype).itemsize
        return table + 4 * num_words(dense_fields(self.bits), like.numel())

    def _is_small(self, like: Tensor) -> bool:
        return self._coded_bytes(like) >= entries.padded(like.numel() * like.itemsize)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Means, and numbers of bins."""
        wire = torch.zeros(self.size(x).num_bytes, dtype=torch.uint8, device=x.device)
        check_finite(self.facts.name, x)
        if self._is_small(x):
            entries.put(wire, 0, x)
            return wire
        values = x.reshape(-1).double()
        scale = torch.stack(values.aminmax()).abs().max()
        values = values / torch.where(scale > 0, scale, 1)  # their squares do not overflow
        half, apart = 2 ** (self.bits - 1), values - values.mean()
        width = apart.square().mean().sqrt() * (_DEVIATIONS / (2 * half))
        codes = (apart / torch.where(width > 0, width, 1)).floor().clamp(-half, half - 1).long() + half
        end = entries.put(wire, 0, (_means(values, codes, 2 * half) * scale).to(wide(x.dtype)))
        entries.put(wire, end, packed(dense_fields(self.bits), codes))
        return wire

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """The mean of each element's bin."""
        n, dtype = like.numel(), wide(like.dtype)
        wire = opened(self.facts.name, self.size(like).num_bytes, like, wire, torch.uint8)
        if self._is_small(like):
            return entries.taken(wire, 0, n, like.dtype).view(like.shape)
        fields, end = dense_fields(self.bits), 2**self.bits * dtype.itemsize
        codes = unpacked(fields, entries.taken(wire, end, num_words(fields, n), torch.int32), n)
        means = entries.taken(wire, 0, 2**self.bits, dtype)
        return narrowed(means[codes], like).view(like.shape)


def _means(values: Tensor, codes: Tensor, number: int) -> Tensor:
    """The mean of each class of values, 0 of none. `index_add_` would add in another order in each run on a GPU."""
    counts = torch.bincount(codes, minlength=number).clamp(min=1)
    return torch.stack([values[codes == code].sum() for code in range(number)]) / counts
