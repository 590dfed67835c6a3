"""Shared code of the codecs of a few elements: the largest elements, and a wire of chosen elements with values.

    header (4 bytes)   form in the two highest bits, number of values in the others
    LIST  0            count indices of 4 bytes, ascending  | count values
    MASK  1            a bit for each element, 32 in a word | count values, in the order of the elements
    ALL   2                                                 | n values, 0 where an element is not sent

The shortest of the three is taken, and padded with zeros to a multiple of 4 bytes. Values have the tensor's dtype.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Entries, add_decoded_
from polytempo.compression.encoding.fields import packed_bits, unpacked_bits, words_per_row
from polytempo.compression.encoding.values import check_flat
from polytempo.core import EncodeContext
from polytempo.native.kernels import codes_sparse
from polytempo.native.kernels.codes_sparse import serves

LIST, MASK, ALL = 0, 1, 2
_COUNT = 2**30 - 1
HEADER_BYTES = 4
_MOST = 2**31 - 1
_SCATTER = 2654435761


def padded(num_bytes: int) -> int:
    """The next multiple of 4."""
    return -(-num_bytes // 4) * 4


def check_count(codec: str, n: int) -> None:
    """Raise ValueError where 31 bits do not count all of n elements."""
    if n > _MOST:
        raise ValueError(f"{codec} is for tensors of up to {_MOST} elements, got {n}; split the tensor")


def check_wire(codec: str, wire: Tensor, out: Tensor) -> None:
    """Raise ValueError unless a wire is bytes in one piece, where `out` is."""
    check_flat(f"a wire of {codec}", wire, out.device, torch.uint8)


def largest(v: Tensor, k: int) -> Tensor:
    """Indices (int64, ascending) of the k largest |v|, of equal ones the first. v: flat and finite, 0 < k <= n."""
    magnitudes = v.abs()
    last = torch.topk(magnitudes, k, sorted=False).values.min()
    more = (magnitudes > last).nonzero().view(-1)
    ties = (magnitudes == last).nonzero().view(-1)[: k - more.numel()]
    return torch.cat([more, ties]).sort().values


def sampled(t: Tensor, count: int, when: EncodeContext) -> Tensor:
    """Some `count` elements of t, flat, at equal distances, beginning by the step and the tensor; or all, if few."""
    stride = max(1, t.numel() // count)
    stride -= stride > 1 and stride % 2 == 0  # odd: rows have even lengths, and columns differ
    first = (when.step + when.tensor) * _SCATTER % 2**32 * stride >> 32
    return t.reshape(-1)[first::stride]


def put(wire: Tensor, place: int, values: Tensor) -> int:
    """Copy the bytes of `values` to wire[place:], at any address; where they end."""
    raw = values.detach().contiguous().view(-1).view(torch.uint8)
    wire[place : place + raw.numel()].copy_(raw)
    return place + raw.numel()


def taken(wire: Tensor, place: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from wire[place:] on, in memory of their own, for a wire may begin anywhere."""
    return wire[place : place + count * dtype.itemsize].clone().view(dtype)


def put_header(wire: Tensor, layout: str, *values: float) -> None:
    """The first bytes of a wire, as `struct` packs them."""
    raw = struct.pack(layout, *values)
    wire[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def header(wire: Tensor, layout: str, codec: str) -> tuple[float, ...]:
    """The values of `put_header`. Raises ValueError where the wire is too short."""
    size = struct.calcsize(layout)
    if wire.numel() < size:
        raise ValueError(f"a wire of {codec} begins with {size} bytes, and this one has {wire.numel()}")
    return struct.unpack(layout, bytes(wire[:size].tolist()))


def wire_bytes(n: int, count: int, itemsize: int) -> int:
    """Bytes of the wire of `count` among n elements; it grows with count."""
    return HEADER_BYTES + padded(min(_sizes(n, count, itemsize)))


def write(indices: Tensor, values: Tensor, n: int) -> Tensor:
    """The wire of `values` at `indices` (int32 or int64, ascending) of n elements."""
    count, itemsize = values.numel(), values.element_size()
    if n > _COUNT:
        raise ValueError(f"a wire of entries is for up to {_COUNT} elements, got {n}; split the tensor")
    sizes = _sizes(n, count, itemsize)
    chosen = sizes.index(min(sizes))
    wire = torch.zeros(HEADER_BYTES + padded(min(sizes)), dtype=torch.uint8, device=values.device)
    put_header(wire, "<I", chosen << 30 | (n if chosen == ALL else count))
    place = HEADER_BYTES
    if chosen == LIST:
        place = put(wire, place, indices.to(torch.int32))
    elif chosen == MASK:
        marks = torch.zeros(1, n, dtype=torch.bool, device=values.device)
        marks[0, indices.long()] = True
        place = put(wire, place, packed_bits(marks))
    elif count < n:
        values = torch.zeros(n, dtype=values.dtype, device=values.device).index_copy_(0, indices.long(), values)
    put(wire, place, values)
    return wire


def opened(wire: Tensor, like: Tensor, codec: str) -> tuple[int, int, int]:
    """The form of a wire, how many values it has, and where they begin. Raises ValueError for another tensor's."""
    check_wire(codec, wire, like)
    n, (word,) = like.numel(), header(wire, "<I", codec)
    form, count = int(word) >> 30, int(word) & _COUNT
    if form > ALL or count > n or (form == ALL and count != n):
        raise ValueError(f"a wire of {codec} says that it has {count} values in form {form}, for {n} elements")
    head = HEADER_BYTES + (4 * count, 4 * words_per_row(n), 0)[form]
    if wire.numel() < head + count * like.element_size():
        raise ValueError(f"a wire of {codec} has {wire.numel()} bytes, which are too few for {count} values")
    return form, count, head


def read(wire: Tensor, like: Tensor, codec: str) -> Tensor | Entries:
    """The content of a wire. Raises ValueError where it cannot be one for such a tensor."""
    form, count, head = opened(wire, like, codec)
    values = taken(wire, head, count, like.dtype)
    if form == ALL:
        return values.view(like.shape)
    if form == LIST:
        return Entries(taken(wire, HEADER_BYTES, count, torch.int32).long(), values)
    indices = unpacked_bits(wire[HEADER_BYTES:head], 1, 8 * (head - HEADER_BYTES)).view(-1).nonzero().view(-1)
    if indices.numel() != count:
        raise ValueError(f"a wire of {codec} marks {indices.numel()} elements, and has {count} values")
    return Entries(indices, values)


def _sizes(n: int, count: int, itemsize: int) -> tuple[int, int, int]:
    return (4 + itemsize) * count, 4 * words_per_row(n) + itemsize * count, itemsize * n


def add_entries_(codec: str, wire: Tensor, out: Tensor) -> None:
    """Add a wire of `compression.entries` to out: a list by the kernel, the other forms by torch."""
    form, count, head = opened(wire, out, codec)
    if form != LIST or not serves(out):
        add_decoded_(read(wire, out, codec), out, codec)
    elif not codes_sparse.add_entries(out, wire[HEADER_BYTES:], wire[head:], count):
        raise ValueError(f"a wire of {codec} has an index beyond the tensor's {out.numel()} elements")
