"""What the codecs of a few elements share: which are the largest, and a wire that holds chosen elements with values.

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

from polytempo.compression.values import check_flat
from polytempo.core import EncodeContext, NotFinite
from polytempo.native import codes_sparse
from polytempo.native.library import available
from polytempo.native.update import DTYPES_CHECKED, unfinite

LIST, MASK, ALL = 0, 1, 2
_COUNT = 2**30 - 1
HEADER_BYTES = 4
_MOST = 2**31 - 1
_SCATTER = 2654435761


def padded(num_bytes: int) -> int:
    """The next multiple of 4."""
    return -(-num_bytes // 4) * 4


def refuse(codec: str, index: int, v: Tensor) -> None:
    """Raise NotFinite for that element of v; -1: for none."""
    if index >= 0:
        raise NotFinite(codec, index, float(v.reshape(-1)[index]))


def check_finite(codec: str, v: Tensor) -> None:
    """Raise NotFinite for the first element that is NaN or infinite. Reads v once."""
    if available() and v.device.type == "cpu" and v.is_contiguous() and v.dtype in DTYPES_CHECKED:
        return refuse(codec, unfinite(v), v)
    bad = v.reshape(-1).isfinite().logical_not_()
    if bool(bad.any()):
        refuse(codec, int(bad.to(torch.uint8).argmax()), v)
    return None


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
    """About `count` elements of t, flat, at equal distances from where the step and the tensor say; or all, if few."""
    stride = max(1, t.numel() // count)
    stride -= stride > 1 and stride % 2 == 0  # odd: rows have even lengths, and columns differ
    first = (when.step + when.tensor) * _SCATTER % 2**32 * stride >> 32
    return t.reshape(-1)[first::stride]


def room(out: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """Memory for a wire of that many bytes: the beginning of `out` where there is one. Raises ValueError."""
    if out is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    check_flat("out", out, device, torch.uint8)
    if out.numel() < num_bytes:
        raise ValueError(f"out has {out.numel()} bytes, and the wire needs {num_bytes}")
    return out[:num_bytes]


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
    """What `put_header` has put there. Raises ValueError where the wire is too short."""
    size = struct.calcsize(layout)
    if wire.numel() < size:
        raise ValueError(f"a wire of {codec} begins with {size} bytes, and this one has {wire.numel()}")
    return struct.unpack(layout, bytes(wire[:size].tolist()))


def add_at_(out: Tensor, indices: Tensor, values: Tensor, codec: str) -> None:
    """out.flatten()[indices] += values, for indices (int64) that a wire has: ValueError where one is beyond out."""
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= out.numel()):
        raise ValueError(
            f"a wire of {codec} has indices from {int(indices.min())} to {int(indices.max())}, and the tensor "
            f"{out.numel()} elements"
        )
    flat = out.reshape(-1)
    flat.index_add_(0, indices, values.to(out.dtype))
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def wire_bytes(n: int, count: int, itemsize: int) -> int:
    """Bytes of the wire of `count` among n elements; it grows with count."""
    return HEADER_BYTES + padded(min(_sizes(n, count, itemsize)))


def write(indices: Tensor, values: Tensor, n: int, out: Tensor | None) -> Tensor:
    """The wire of `values` at `indices` (int32 or int64, ascending) of n elements."""
    count, itemsize = values.numel(), values.element_size()
    if n > _COUNT:
        raise ValueError(f"a wire of entries is for up to {_COUNT} elements, got {n}; split the tensor")
    sizes = _sizes(n, count, itemsize)
    chosen = sizes.index(min(sizes))
    wire = room(out, HEADER_BYTES + padded(min(sizes)), values.device)
    put_header(wire, "<I", chosen << 30 | (n if chosen == ALL else count))
    place = HEADER_BYTES
    if chosen == LIST:
        place = put(wire, place, indices.to(torch.int32))
    elif chosen == MASK:
        marks = torch.zeros(_words(n) * 32, dtype=torch.bool, device=values.device)
        marks[indices.long()] = True
        place = put(wire, place, _bytes_of_bits(marks))
    elif count < n:
        values = torch.zeros(n, dtype=values.dtype, device=values.device).index_copy_(0, indices.long(), values)
    wire[put(wire, place, values) :] = 0
    return wire


def add_(wire: Tensor, out: Tensor, codec: str) -> None:
    """out += the entries of a wire. Raises ValueError, and adds nothing, where it cannot be one for such a tensor."""
    check_wire(codec, wire, out)
    n, (word,) = out.numel(), header(wire, "<I", codec)
    form, count = int(word) >> 30, int(word) & _COUNT
    if form > ALL or count > n or (form == ALL and count != n):
        raise ValueError(f"a wire of {codec} says that it has {count} values in form {form}, for {n} elements")
    head = HEADER_BYTES + (4 * count, 4 * _words(n), 0)[form]
    if wire.numel() < head + count * out.element_size():
        raise ValueError(f"a wire of {codec} has {wire.numel()} bytes, which are too few for {count} values")
    if form == LIST and codes_sparse.serves(out):
        if not codes_sparse.add_entries(out, wire[HEADER_BYTES:], wire[head:], count):
            raise ValueError(f"a wire of {codec} has an index beyond the tensor's {n} elements")
        return
    values = taken(wire, head, count, out.dtype)
    if form == ALL:
        out.add_(values.view(out.shape))
        return
    if form == LIST:
        indices = taken(wire, HEADER_BYTES, count, torch.int32).long()
    else:
        indices = _bits_of_bytes(wire[HEADER_BYTES:head]).nonzero().view(-1)
        if indices.numel() != count:
            raise ValueError(f"a wire of {codec} marks {indices.numel()} elements, and has {count} values")
    add_at_(out, indices, values, codec)


def _sizes(n: int, count: int, itemsize: int) -> tuple[int, int, int]:
    return (4 + itemsize) * count, 4 * _words(n) + itemsize * count, itemsize * n


def _words(n: int) -> int:
    return -(-n // 32)


def _bytes_of_bits(marks: Tensor) -> Tensor:
    """Eight bools become a byte, the first its lowest bit."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=marks.device)
    return (marks.view(-1, 8).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)


def _bits_of_bytes(raw: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return (raw.view(-1, 1) >> shifts & 1).view(-1)
