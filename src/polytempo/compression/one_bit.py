"""1-bit SGD: a sign for each element, and for each row what the two signs mean.

Source: F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs", 2014, section 3; and the authors' CNTK, for the threshold 0 and the means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.compression.int8 import computed, give_, refuse, refuse_sum
from polytempo.compression.values import opened, room
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.native import codes_dense as native

WORD = 32
_MOST = torch.finfo(torch.float32).max
_SHORTEST_ROW = 4
"""12 bytes are at least what a row takes, so shorter ones would grow."""


def words_per_row(row_length: int) -> int:
    """Rows begin with a new word."""
    return -(-row_length // WORD)


def packed(bits: Tensor) -> Tensor:
    """bool (num_rows, row_length) as uint8 (num_rows, 4 · words_per_row): bit j % 8 of byte j / 8 is element j."""
    num_rows, length = bits.shape
    num_bytes = words_per_row(length) * WORD // 8
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, 8 * num_bytes - length)).view(num_rows, num_bytes, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def unpacked(words: Tensor, num_rows: int, row_length: int) -> Tensor:
    """The bools of `packed`."""
    num_bytes = words_per_row(row_length) * WORD // 8
    eights = words.view(num_rows, num_bytes, 1) >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (eights & 1).view(num_rows, 8 * num_bytes)[:, :row_length].bool()


def to_float(numbers: Tensor) -> Tensor:
    """As float32, in which what is finite stays so."""
    return numbers.clamp(-_MOST, _MOST).float()


def bits_loss(row_length: int, like: Tensor) -> float:
    """‖x - x̂‖² ≤ loss · ‖x‖², when x̂ is the projection of a row on its classes, rounded to a float."""
    dtype = like.dtype if like.dtype in (torch.float16, torch.bfloat16) else torch.float32
    return 1 - (1 - torch.finfo(dtype).eps ** 2) / max(1, row_length)


def row_length(like: Tensor) -> int:
    """Of the rows [shape[0], rest]. Vectors, and matrices whose rows would grow, are one row."""
    if not like.numel():
        return 1
    rest = like.numel() // like.shape[0] if like.dim() > 1 else like.numel()
    return rest if rest >= _SHORTEST_ROW else like.numel()


@dataclass(frozen=True)
class OneBit:
    """See `one_bit`."""

    name: str = "one_bit()"
    summable: bool = False
    sparse: bool = False
    fixed: bool = True
    passes_nonfinite: bool = False
    flops: float = 5.0

    @property
    def law(self) -> Law:
        """See `one_bit` for the proof."""
        return Law("contraction", lambda like: 1 - bits_loss(row_length(like), like))

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """8 a row, and 4 for every 32 elements of it."""
        length = row_length(like)
        return like.numel() // length * (8 + 4 * words_per_row(length))

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """Signs and means."""
        x = x.detach()
        wire, means, words = self._room(x, out)
        if native.fits(x):
            refuse_sum(self.name, x, None, native.one_bit_(x, None, means, words, row_length(x)))
            return wire, state
        flat = computed(x)
        refuse(self.name, flat)
        rows = flat.view(-1, row_length(x))
        positive = rows >= 0
        wide, count = rows.double(), positive.sum(1)
        ups = torch.where(positive, wide, 0).sum(1) / count.clamp(min=1)
        downs = torch.where(positive, 0, wide).sum(1) / (rows.shape[1] - count).clamp(min=1)
        means.view(-1, 2).copy_(to_float(torch.stack([downs, ups], 1)))
        words.copy_(packed(positive).view(-1))
        return wire, state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """As `encode` of v = x + residual; residual ← v - decode(wire)."""
        x = x.detach()
        if native.fits(x, residual):
            wire, means, words = self._room(x, out)
            refuse_sum(self.name, x, residual, native.one_bit_(x, residual, means, words, row_length(x)))
            return wire, state
        wire, state = self.encode(x + residual, state, when, out)
        return give_(wire, x, residual, self.decode(wire, x, when)), state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """The mean that each bit names."""
        if native.fits(like):
            found = torch.zeros_like(like)
            self.add_(wire, found)
            return found
        means, words = self._parts(wire, like)
        pairs = means.view(-1, 2)
        bits = unpacked(words, len(pairs), row_length(like))
        return torch.where(bits, pairs[:, 1:], pairs[:, :1]).view(like.shape).to(like.dtype)

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += the mean that each bit names."""
        if native.fits(out):
            native.add_one_bit_(*self._parts(wire, out), out, row_length(out))
        else:
            out.add_(self.decode(wire, out, when))

    def _room(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        wire = room(self.name, self.wire_bytes(x), x, out, torch.uint8)
        return wire, *self._parts(wire, x)

    def _parts(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        end = 8 * (like.numel() // row_length(like))
        wire = opened(self.name, self.wire_bytes(like), like, wire, torch.uint8)
        return wire[:end].view(torch.float32), wire[end:]


def one_bit() -> OneBit:
    """bit = (v ≥ 0); x̂ = the mean of the row's entries of v with the same bit. To be used with `feedback`.

        wire  [ for each row: mean of its negative entries, mean of the others: float32 | for each row: its bits ]

    Bit j % 32 of word j / 32 is the row's element j; rows begin with a new word, whose rest is 0. A class without
    entries has mean 0. Rows are those of v as [shape[0], rest]; a vector is one row, and so is a tensor whose rows have
    fewer than 4 elements, because it would grow.

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
    return OneBit()
