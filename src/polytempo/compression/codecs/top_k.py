"""The k elements of the largest magnitude, and where they are.

Source: A. F. Aji, K. Heafield, "Sparse communication for distributed gradient descent", 2017; S. U. Stich et al.,
"Sparsified SGD with memory", 2018, Definition 2.1. Indices in fewer bytes: N. Strom, 2015, section 4.2, names entropy
coding; here by zstd (Y. Collet, M. Kucherawy, RFC 8878, 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import Coded, Entries, Kernels, WireSize, add_decoded_, from_zeros, placed
from polytempo.compression.encoding.values import check_finite, refuse, room
from polytempo.compression.kernels import on_device
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real
from polytempo.native.kernels import codes_sparse
from polytempo.native.kernels.codes_sparse import serves

_HEADER_BYTES = 4
_LEVEL = 1
"""The lowest level of zstd has the coding of bytes by frequency, which is its best part here."""


def top_k(ratio: float = 0.01, entropy: bool = False) -> Coded:
    """The k = max(1, ⌈ratio · n⌉) elements of the largest |v|; equal ones by the lowest index.

        wire           | k indices (int32, ascending) | k values in the dtype of the tensor |
        with entropy   | bytes of the next (0: as above) | zstd of the indices' differences, or they | k values |

    Exactly the k largest, by any path: the kernel guesses a threshold from a sample, collects in one pass the elements
    above it, and selects among them; where the guess was wrong it counts by radix first. All instruction sets and
    torch give the same wire. Bytes: k · (4 + itemsize), fixed; 8 for a float32, so 2 % of the tensor at ratio 0.01.
    entropy=True (the extra `polytempo[zstd]`) brings indices of random places from 4 bytes to a little over 1 at 1 %,
    and wires are not `fixed`; 4 bytes more are the most. In wires of two bytes a value the end is padded to 4.

    Law: contraction k/n (Stich et al., Lemma A.1). Without `feedback` small values are never sent. Cost with a
    residual: both are read twice, and r written once.

    Raises ValueError for a ratio not in (0, 1] and for tensors of 2^31 elements or more, ImportError where zstandard is
    missing, and NotFinite, before anything has changed, for NaN and infinities.
    """
    check_real(ratio=ratio)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is a share of the elements, over 0 and at most 1, got {ratio}")
    if entropy:
        _zstd()  # without it the error comes here, not at the first step
    return Coded(TopK(ratio, entropy), _KERNELS)


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
        """The k largest: their places and values."""
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
            indices = unpacked_indices(wire[start : start + length], k).to(like.device)
        else:
            indices = entries.taken(wire, start, k, torch.int32).long()
        return Entries(indices, entries.taken(wire, end, k, like.dtype))

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """The bytes of k indices and k values; with entropy 4 more at most: indices that zstd cannot shorten stay."""
        entries.check_count(self.facts.name, like.numel())
        return WireSize(_HEADER_BYTES * self.entropy + self.plain_bytes(like))

    def plain_bytes(self, like: Tensor) -> int:
        """Bytes of the wire before its indices are compressed."""
        k = self.num_sent(like)
        return 4 * k + entries.padded(k * like.element_size())

    def sent(self, plain: Tensor, x: Tensor) -> Tensor:
        """The wire made of the plain one."""
        k = self.num_sent(x)
        if not self.entropy:
            return plain
        raw = packed_indices(entries.taken(plain, 0, k, torch.int32)) if k else plain
        shorter = 0 < entries.padded(raw.numel()) < 4 * k
        head = entries.padded(raw.numel()) if shorter else 4 * k
        wire = torch.zeros(_HEADER_BYTES + head + plain.numel() - 4 * k, dtype=torch.uint8, device=x.device)
        entries.put_header(wire, "<I", raw.numel() if shorter else 0)
        entries.put(wire, _HEADER_BYTES, raw if shorter else plain[: 4 * k])
        entries.put(wire, _HEADER_BYTES + head, plain[4 * k :])
        return wire

    def opened(self, wire: Tensor, like: Tensor) -> tuple[int, int, int]:
        """The begin of indices and of values on a wire, and bytes of compressed indices (0: they are not).
        ValueError."""
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


def _zstd() -> ModuleType:
    """The module `zstandard`. Raises ImportError that names the remedy."""
    try:
        import zstandard
    except ImportError:
        raise ImportError(
            "entropy=True needs the library zstandard; `pip install 'polytempo[zstd]'` brings it"
        ) from None
    return zstandard


def packed_indices(indices: Tensor) -> Tensor:
    """Ascending indices (int32, on any device) as bytes.

    1. differences to the one before         3 5 260 261      3 2 255 1
    2. all lowest bytes, then the next ones, …: where one in a hundred is sent, three of four planes are almost all 0
    3. zstd
    """
    deltas = indices.cpu().diff(prepend=torch.zeros(1, dtype=torch.int32))
    planes = deltas.contiguous().view(torch.uint8).view(-1, 4).t().contiguous()
    found = _zstd().ZstdCompressor(level=_LEVEL).compress(planes.numpy())
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def unpacked_indices(raw: Tensor, count: int) -> Tensor:
    """The `count` indices (int64, on the CPU). Raises ValueError where the bytes hold another number."""
    zstd, data = _zstd(), raw.cpu().contiguous().numpy().tobytes()
    try:
        if zstd.get_frame_parameters(data).content_size != 4 * count:
            raise ValueError(f"the indices of a wire are not {count}")
        planes = zstd.ZstdDecompressor().decompress(data, max_output_size=4 * count)
    except zstd.ZstdError as error:
        raise ValueError(f"the indices of a wire are not a zstd frame: {error}") from None
    deltas = torch.frombuffer(bytearray(planes), dtype=torch.uint8).view(4, -1).t().contiguous().view(torch.int32)
    return deltas.view(-1).long().cumsum(0)


def _encode(encoding: TopK, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
    name, k, fixed = encoding.facts.name, encoding.num_sent(x), encoding.facts.fixed
    plain = room(name, encoding.plain_bytes(x), x, out if fixed else None, torch.uint8)
    refuse(name, codes_sparse.SourceArrays(x, residual).top(k, plain).bad, x, residual)
    wire = encoding.sent(plain, x)
    if not fixed and out is not None:
        wire = placed(name, wire, out)
    if residual is not None:
        residual.add_(x)
        codes_sparse.zero(residual, plain, k)
    return wire


def _add_(encoding: TopK, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    start, end, length = encoding.opened(wire, out)
    if length:
        add_decoded_(encoding.decode(wire, out, when), out, encoding.facts.name)
    elif not codes_sparse.add_entries(out, wire[start:], wire[end:], encoding.num_sent(out)):
        raise ValueError(f"a wire of {encoding.facts.name} has an index beyond the tensor's {out.numel()} elements")


def _encode_on_device(
    encoding: TopK, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    k = encoding.num_sent(x)
    indices, values = (torch.empty(k, dtype=dtype, device=x.device) for dtype in (torch.int32, x.dtype))
    refuse(encoding.facts.name, on_device.top(x, residual, k, indices, values), x, residual)
    wire = encoding.sent(torch.cat([indices.view(torch.uint8), values.view(torch.uint8)]), x)
    return wire if out is None else placed(encoding.facts.name, wire, out)


_NATIVE = Kernels(serves, _add_, from_zeros(_add_), serves, _encode)
_KERNELS = _NATIVE.or_else(
    _NATIVE._replace(decodes=lambda like: False, encodes=on_device.fits, encode=_encode_on_device)
)
