"""The largest elements of each chunk of a tensor, or of its cosine transform, in a few bits each.

    wire    scale | a value for each code, or all values | indices within chunks, 12 bits each | codes, `bits` each

Source: A. Sarfi, B. Thérien, J. Lidin and E. Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
2025; with the transform, B. Peng, J. Quesnelle and D. P. Kingma, "DeMo: decoupled momentum optimization", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import Coded, Entries, WireSize
from polytempo.compression.encoding.fields import dense_fields, num_words, packed, unpacked
from polytempo.compression.encoding.values import check_finite
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real
from polytempo.core.state import narrowed, wide
from polytempo.native.kernels import codes_sparse

_EDGE = 64
_CHUNK = _EDGE * _EDGE
_PLACES = dense_fields(12)
"""An index within a chunk of 4096 elements."""
_MOST_BITS = 8


def chunk_top_k(ratio: float = 0.015625, bits: int | None = 2, rotated: bool = False) -> Coded:
    """The ⌈ratio · 4096⌉ elements of the largest |v| of each chunk of 4096, each in `bits` bits.

    Chunks follow the flat tensor, so no dimension of it makes them small or dense; the rest makes a chunk of whole rows
    of 64, and one of the last elements. Equal elements count by the lowest index. A code is the sign and one of
    2^(bits-1) bins of |v|, of equal width up to twice the mean; it decodes to the mean of the tensor's elements in its
    bin, and the 2^bits means travel. `bits=None` sends the values.

    rotated=True takes a chunk's orthonormal cosine transform (DCT-II) of 64 rows and 64 columns in the place of its
    elements. Ranks with other processors may then decode to other last bits.

    Bytes: an element of those costs 12 + `bits` bits, so at 1/64 and 2 bits a tensor of float32 becomes 1/146 of it.
    Law: contraction; without `feedback` small elements are never sent. Cost: four passes over each chunk on the CPU, by
    a kernel, and elsewhere a sort of it; two products with matrices of 64 x 64 for the transform.
    Deviations: the released code cuts matrices into blocks of 64 x 64 with edges that divide their dimensions, and has
    bins around the mean, of both signs.
    Errors: ValueError for a ratio not in (0, 1] and for bits not from 1 to 8; NotFinite for NaN and infinities.
    """
    check_real(ratio=ratio)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is a share of the elements, over 0 and at most 1, got {ratio}")
    if bits is not None and not 1 <= bits <= _MOST_BITS:
        raise ValueError(f"bits are from 1 to {_MOST_BITS}, or None for the values themselves; got {bits}")
    return Coded(ChunkTopK(ratio, bits, rotated))


class _Chunks(NamedTuple):
    """`number` chunks of `rows` x `cols` elements, `start` elements from the beginning."""

    start: int
    number: int
    rows: int
    cols: int

    @property
    def size(self) -> int:
        return self.rows * self.cols

    def of(self, flat: Tensor) -> Tensor:
        """The chunks of a flat tensor, shape (count, rows, cols)."""
        return flat[self.start : self.start + self.number * self.size].view(self.number, self.rows, self.cols)


def _chunks(n: int) -> Iterator[_Chunks]:
    whole, rest = divmod(n, _CHUNK)
    rows, cols = divmod(rest, _EDGE)
    for each in (
        _Chunks(0, whole, _EDGE, _EDGE),
        _Chunks(whole * _CHUNK, 1, rows, _EDGE),
        _Chunks(n - cols, 1, 1, cols),
    ):
        if each.number * each.size:
            yield each


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places of the k largest |v| in each row of `values` (rows, size), int64 and ascending, and their values."""
    return codes_sparse.chunk_top(values, k) if codes_sparse.serves(values) else largest_by_sorting(values, k)


def largest_by_sorting(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The twin of the kernel `chunk_top`."""
    order = values.abs().sort(dim=1, descending=True, stable=True).indices
    places = order[:, :k].sort(dim=1).values
    return places, values.gather(1, places)


@dataclass(frozen=True)
class ChunkTopK:
    """See `chunk_top_k`."""

    ratio: float
    bits: int | None
    rotated: bool

    @cached_property
    def facts(self) -> Facts:
        """A part of all |v| is sent, and means of one sign keep its square, divided by the number of elements."""
        name = codec_name(chunk_top_k, self, brief=("rotated",))
        law = Law("contraction", lambda like: self._kept(like.numel()))
        return Facts(name, law, flops=300.0 if self.rotated else 40.0, sparse=True)

    def _kept(self, n: int) -> float:
        return self.ratio if self.bits is None else self.ratio**2 / max(1, self._num_sent(n))

    def _each(self, chunks: _Chunks) -> int:
        return math.ceil(self.ratio * chunks.size)

    def _num_sent(self, n: int) -> int:
        return sum(chunks.number * self._each(chunks) for chunks in _chunks(n))

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """Bytes of the scale, of values, of indices and of codes."""
        entries.check_count(self.facts.name, like.numel())
        sent, itemsize = self._num_sent(like.numel()), wide(like.dtype).itemsize
        values = sent if self.bits is None else 2**self.bits
        codes = 0 if self.bits is None else num_words(dense_fields(self.bits), sent)
        return WireSize((1 + values) * itemsize + 4 * (num_words(_PLACES, sent) + codes) if sent else 0)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Elements of the largest magnitude, chunk by chunk."""
        name, wire = self.facts.name, torch.zeros(self.size(x).num_bytes, dtype=torch.uint8, device=x.device)
        check_finite(name, x)
        if not x.numel():
            return wire
        flat = x.reshape(-1).to(wide(x.dtype))
        scale = (
            flat.new_ones(1)
            if self.bits is None and not self.rotated
            else torch.stack(flat.aminmax()).abs().max().view(1)
        )
        flat = flat / torch.where(scale > 0, scale, 1)
        found = [_largest(self._rows(chunks, flat), self._each(chunks)) for chunks in _chunks(flat.numel())]
        places, values = (torch.cat([each.view(-1) for each in parts]) for parts in zip(*found, strict=True))
        if self.bits is None:
            end = entries.put(wire, entries.put(wire, 0, scale), values)
            entries.put(wire, end, packed(_PLACES, places))
            return wire
        codes = self._codes(values)
        table = torch.stack([_mean(values[codes == code]) for code in range(2**self.bits)])
        end = entries.put(wire, entries.put(wire, 0, scale), table)
        end = entries.put(wire, end, packed(_PLACES, places))
        entries.put(wire, end, packed(dense_fields(self.bits), codes))
        return wire

    def _rows(self, chunks: _Chunks, flat: Tensor) -> Tensor:
        """The chunks, or their transforms, one in a row."""
        values = chunks.of(flat)
        if self.rotated:
            values = _cosines(chunks.rows, flat) @ values @ _cosines(chunks.cols, flat).T
        return values.reshape(chunks.number, chunks.size)

    def _codes(self, values: Tensor) -> Tensor:
        assert self.bits is not None
        half, sizes = 2 ** (self.bits - 1), values.abs()
        widest = 2 * sizes.double().mean()
        bins = (sizes.double() * half / torch.where(widest > 0, widest, 1)).long().clamp(max=half - 1)
        codes: Tensor = bins + half * (values < 0)
        return codes

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor | Entries:
        """Values at their places; or the inverse transform."""
        n, dtype = like.numel(), wide(like.dtype)
        entries.check_wire(self.facts.name, wire, like)
        if wire.numel() < self.size(like).num_bytes:
            raise ValueError(f"a wire of {self.facts.name} for {n} elements has {wire.numel()} bytes: too few")
        sent = self._num_sent(n)
        if not sent:
            return torch.zeros_like(like)
        scale, end = entries.taken(wire, 0, 1, dtype), dtype.itemsize
        count = sent if self.bits is None else 2**self.bits
        values, end = entries.taken(wire, end, count, dtype), end + count * dtype.itemsize
        words = num_words(_PLACES, sent)
        places, end = unpacked(_PLACES, entries.taken(wire, end, words, torch.int32), sent), end + 4 * words
        if self.bits is not None:
            fields = dense_fields(self.bits)
            values = values[unpacked(fields, entries.taken(wire, end, num_words(fields, sent), torch.int32), sent)]
        indices = places + self._starts(n, wire.device)
        if not self.rotated:
            return Entries(indices, narrowed(values * scale, like))
        if int(indices.max()) >= n:
            raise ValueError(f"a wire of {self.facts.name} has an index beyond the tensor's {n} elements")
        flat = torch.zeros(n, dtype=dtype, device=wire.device).index_copy_(0, indices, values)
        for chunks in _chunks(n):
            part = chunks.of(flat)
            part.copy_(_cosines(chunks.rows, flat).T @ part @ _cosines(chunks.cols, flat))
        return narrowed(flat.double() * scale.double(), like).view(like.shape)  # may overflow float32

    def _starts(self, n: int, device: torch.device) -> Tensor:
        """The first element of each sent element's chunk."""
        parts = [
            (chunks.start + chunks.size * torch.arange(chunks.number, device=device)).repeat_interleave(
                self._each(chunks)
            )
            for chunks in _chunks(n)
        ]
        return torch.cat(parts)


def _mean(values: Tensor) -> Tensor:
    """The mean; 0 of none."""
    total: Tensor = values.double().sum()
    return (total / max(1, values.numel())).to(values.dtype)


def _cosines(n: int, like: Tensor) -> Tensor:
    """The orthonormal DCT-II of n numbers as a matrix (n, n)."""
    return _cosine_matrix(n, like.dtype, like.device)


@lru_cache(maxsize=256)
def _cosine_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    frequencies, places = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64) + 0.5
    matrix: Tensor = (frequencies * places * (math.pi / n)).cos() * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype=dtype, device=device)
