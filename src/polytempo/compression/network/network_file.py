"""The file of a compressed network: `docs/compressed-networks.md` describes it for other programs.

    "PTNET001" | H: 4 bytes | header: H bytes of JSON | the tensors' parts, in the header's order

    [name, shape, dtype]                                        values
    [name, shape, dtype, kept, C, b, gaps, G, I]                centroids | lengths | lengths | gaps | members
    [name, other]                                               nothing: the same tensor by another name

Numbers are little-endian, tensors in the order of C. `kept` elements are not zero. A gap is the number of zeros before
such an element; the largest symbol, 2^b - 1, is as many zeros and no element. Of `gaps` symbols there are G bytes; of
the clusters' numbers I bytes. Without gaps all elements are kept, or none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polytempo.compression.network import huffman
from polytempo.compression.network.shared_values import SharedValues

MAGIC = b"PTNET001"
_DTYPES = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.float16: "<f2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_GAP_BITS = range(1, 9)
_MOST_ELEMENTS = 1 << 31


class TensorSize(NamedTuple):
    """A tensor in the file."""

    name: str
    numel: int
    kept: int
    centroids: int
    """The values that its elements share; 0: each has its own."""
    num_bytes: int
    """Bytes of its part; the header is not counted."""


class KeptElements(NamedTuple):
    """The elements of a tensor that are stored, as members of clusters; the others are 0."""

    places: Tensor
    """(n,), int64, ascending: in the flat tensor."""
    shared: SharedValues


class _Part(NamedTuple):
    entry: list[Any]
    body: bytes
    size: TensorSize


def to_bytes(tensors: Mapping[str, Tensor], kept: Mapping[str, KeptElements]) -> tuple[bytes, list[TensorSize]]:
    """The file of `tensors`, and the size of each. Tensors of `kept` are stored by clusters, others as they are.

    A tensor with several names is stored once. Errors: ValueError for a dtype that NumPy
    does not know.
    """
    first: dict[tuple[Any, ...], str] = {}
    parts = []
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and (other := first.setdefault(place, name)) != name:
            parts.append(_Part([name, other], b"", TensorSize(name, 0, 0, 0, 0)))
        else:
            parts.append(_part(name, tensor.detach().cpu(), kept.get(name)))
    header = json.dumps([part.entry for part in parts], separators=(",", ":")).encode("ascii")
    body = b"".join(part.body for part in parts)
    return MAGIC + len(header).to_bytes(4, "little") + header + body, [part.size for part in parts]


def _part(name: str, tensor: Tensor, kept: KeptElements | None) -> _Part:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} is of {tensor.dtype}, which NumPy does not read; convert the model to float32")
    entry: list[Any] = [name, list(tensor.shape), _DTYPES[tensor.dtype]]
    numel = tensor.numel()
    if kept is None:
        body = _raw(tensor)
        return _Part(entry, body, TensorSize(name, numel, numel, 0, len(body)))
    places, members, centroids = kept.places.numpy(), kept.shared.members.numpy(), kept.shared.centroids
    lengths = huffman.code_lengths(np.bincount(members, minlength=len(centroids)).tolist())
    indices = huffman.encode(members, lengths)
    few = min((_gaps(places, bits, whole=len(places) == numel) for bits in _GAP_BITS), key=lambda gaps: gaps.num_bytes)
    clusters = len(lengths)
    body = _raw(centroids) + bytes(lengths) + bytes(few.lengths) + few.stream + indices
    entry += [len(places), clusters, few.bits, few.num_symbols, len(few.stream), len(indices)]
    return _Part(entry, body, TensorSize(name, numel, len(places), clusters, len(body)))


class _Gaps(NamedTuple):
    bits: int
    num_symbols: int
    lengths: list[int]
    stream: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.lengths) + len(self.stream)


def _gaps(places: NDArray[np.int64], bits: int, *, whole: bool) -> _Gaps:
    """The zeros before each place, as symbols of so many bits."""
    most = (1 << bits) - 1
    if whole:
        return _Gaps(bits, 0, [0] * (most + 1), b"")
    fillers, rests = np.divmod(np.diff(places, prepend=-1) - 1, most)
    symbols = np.full(len(rests) + int(fillers.sum()), most, np.int64)
    symbols[np.cumsum(fillers + 1) - 1] = rests
    lengths = huffman.code_lengths(np.bincount(symbols, minlength=most + 1).tolist())
    return _Gaps(bits, len(symbols), lengths, huffman.encode(symbols, lengths))


def _raw(tensor: Tensor) -> bytes:
    array = tensor.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


# ---------------------------------------------------------------------------------------------------------- reading


def compressed_model(path: str | Path) -> dict[str, Tensor]:
    """The parameters and buffers in the file of `pt.training.compress`, by the names that the job's model has.

        net.load_state_dict(pt.training.compressed_model("runs/mine/network.ptnet"))

    Cost: about a microsecond for each weight that is not zero. Errors: ValueError for another file or a damaged one.
    Other programs need only Python and NumPy: `examples/compressed_network.py` has a decoder.
    """
    return from_bytes(Path(path).read_bytes(), str(path))


def from_bytes(content: bytes, what: str) -> dict[str, Tensor]:
    """The tensors in a file's content. `what` names it in errors."""
    if not content.startswith(MAGIC):
        raise ValueError(f"{what} is not a compressed network: it does not begin with {MAGIC.decode()}")
    try:
        return _Reader(content).tensors()
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{what} is damaged: {error}") from error


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, len(MAGIC)
        self._entries: list[Any] = json.loads(self._taken(int.from_bytes(self._taken(4), "little")))
        self._found: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        for name, *rest in self._entries:
            self._found[name] = self._found[rest[0]] if len(rest) == 1 else self._tensor(*rest)
        if self._at != len(self._content):
            raise ValueError(f"{len(self._content) - self._at} bytes are left")
        return self._found

    def _taken(self, num_bytes: int) -> bytes:
        part = self._content[self._at : self._at + num_bytes]
        if num_bytes < 0 or len(part) < num_bytes:
            raise ValueError(f"{num_bytes} bytes are missing at byte {self._at}")
        self._at += num_bytes
        return part

    def _values(self, dtype: str, count: int) -> Tensor:
        if dtype not in _DTYPES.values():
            raise ValueError(f"there is no dtype {dtype!r}")
        array = np.frombuffer(self._taken(count * np.dtype(dtype).itemsize), dtype)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))

    def _tensor(self, shape: Sequence[int], dtype: str, *sizes: int) -> Tensor:
        numel = math.prod(shape)
        if not 0 <= numel <= _MOST_ELEMENTS:
            raise ValueError(f"a tensor of shape {shape}")
        if not sizes:
            return self._values(dtype, numel).view(tuple(shape))
        kept, clusters, bits, gaps, gap_bytes, member_bytes = sizes
        if bits not in _GAP_BITS or not 0 <= kept <= numel:
            raise ValueError(f"{kept} elements among {numel}, with gaps of {bits} bits")
        centroids = self._values(dtype, clusters)
        member_lengths, gap_lengths = self._taken(clusters), self._taken(1 << bits)
        gap_stream = self._taken(gap_bytes)
        places = _places(huffman.decode(gap_stream, gaps, gap_lengths), (1 << bits) - 1) if gaps else np.arange(kept)
        members = huffman.decode(self._taken(member_bytes), kept, member_lengths)
        if len(places) != kept or (kept and places[-1] >= numel):
            raise ValueError(f"{len(places)} places of {kept} elements among {numel}")
        flat = torch.zeros(numel, dtype=centroids.dtype)
        flat[torch.from_numpy(places)] = centroids[torch.from_numpy(members)]
        return flat.view(tuple(shape))


def _places(symbols: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """The places of elements from the zeros between them."""
    is_element = symbols < most
    places: NDArray[np.int64] = (np.cumsum(symbols + is_element) - 1)[is_element]
    return places
