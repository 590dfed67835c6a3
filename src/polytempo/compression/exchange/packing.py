"""`Packing`: several tensors, or rows of them, as one message.

    message   [ lengths, where wires vary | wire of w1 | wire of b1 | wire of w2 | … ]     each a multiple of 8 bytes

Small tensors travel as they are: their bytes do not matter, and their errors would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import exact
from polytempo.core import Codec, CodecState, EncodeContext, NotFinite
from polytempo.core.arithmetic.kernel_use import Uses, together
from polytempo.core.coding import codec_use

EXACT_BELOW = 1024
"""The default: tensors of fewer elements travel as they are."""

_ALIGNED = 8
"""The alignment of all numbers."""


class Piece(NamedTuple):
    """Rows `first` up to `end` of tensor `name` (elements, of a vector), and the codec that they travel by."""

    name: str
    first: int
    end: int
    codec: Codec

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of `tensor`, as a view."""
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return rows if (self.first, self.end) == (0, len(rows)) else rows[self.first : self.end]

    @property
    def number(self) -> int:
        """`EncodeContext.tensor`."""
        return crc32(f"{self.name}[{self.first}:".encode())


def whole(tensors: Mapping[str, Tensor], codec: Codec, exact_below: int = EXACT_BELOW) -> list[Piece]:
    """A piece for each tensor."""
    return [
        Piece(name, 0, len(t) if t.dim() else 1, exact() if t.numel() < exact_below else codec)
        for name, t in tensors.items()
        if t.numel()
    ]


def stripes(pieces: Sequence[Piece], tensors: Mapping[str, Tensor], num_stripes: int) -> list[list[Piece]]:
    """The pieces cut between rows into parts of nearly as many elements each, one behind the other.

    w1 [ . . . | . ]  b1 [ . ]  w2 [ . . | . . . ]         3 stripes
    """
    total = sum(piece.of(tensors[piece.name]).numel() for piece in pieces)
    found: list[list[Piece]] = [[] for _ in range(num_stripes)]
    before = 0
    for piece in pieces:
        rows = piece.end - piece.first
        width = piece.of(tensors[piece.name]).numel() // rows
        for j, stripe in enumerate(found):
            first, end = (
                min(max(round((total * edge / num_stripes - before) / width), 0), rows) for edge in (j, j + 1)
            )
            if first < end:
                stripe.append(piece._replace(first=piece.first + first, end=piece.first + end))
        before += rows * width
    return found


class Packing:
    """A message's layout. `likes`: tensors of the shapes that the pieces are of."""

    def __init__(self, pieces: Sequence[Piece], likes: Mapping[str, Tensor]) -> None:
        self.pieces = tuple(pieces)
        self.fixed = all(piece.codec.facts.fixed for piece in pieces)
        shapes = [_shape(piece.of(likes[piece.name])) for piece in pieces]
        self._sizes = [_padded(p.codec.wire_bytes(like)) for p, like in zip(pieces, shapes, strict=True)]
        self._head = 0 if self.fixed else _padded(4 * len(self.pieces))
        self.num_bytes = self._head + sum(self._sizes)
        """Bytes of a message; the most, where it is not `fixed`."""
        self.flops = sum(p.codec.facts.flops * like.numel() for p, like in zip(pieces, shapes, strict=True))
        self._tensor_bytes = [like.numel() * like.element_size() for like in shapes]

    def uses(self, kernel: Literal["encode", "decode"], times: int = 1) -> Uses:
        """The load of encoding all pieces, or of decoding and adding them, `times` times."""
        found = together(
            codec_use(kernel, piece.codec, num_bytes)
            for piece, num_bytes in zip(self.pieces, self._tensor_bytes, strict=True)
        )
        return found if times == 1 else tuple(use.times(times) for use in found)

    def encode(
        self, tensors: Mapping[str, Tensor], states: Mapping[str, CodecState], step: int, rank: int, life: int = 0
    ) -> tuple[Tensor, dict[str, CodecState]]:
        """The message (uint8, flat), and the next states, of one tensor each."""
        device = next(iter(tensors.values())).device if tensors else None
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        lengths: list[int] = []
        after: dict[str, CodecState] = {}
        place = self._head
        for piece, size in zip(self.pieces, self._sizes, strict=True):
            x = piece.of(tensors[piece.name])
            room = buffer[place : place + size]
            when = EncodeContext(step, rank, piece.number, life=life)
            used, after[piece.name] = write(piece, x, states.get(piece.name), when, room)
            lengths.append(used)
            place += used if not self.fixed else size
        if not self.fixed:
            lengths += [0] * (self._head // 4 - len(lengths))
            buffer[: self._head].view(torch.int32).copy_(torch.tensor(lengths, dtype=torch.int32))
        return buffer[:place], after

    def add_(self, message: Tensor, outs: Mapping[str, Tensor], step: int, rank: int) -> None:
        """outs += the message of `rank`. Raises ValueError where its length is impossible."""
        if message.is_meta:
            return
        for piece, wire in self._wires(message):
            out = piece.of(outs[piece.name])
            when = EncodeContext(step, rank, piece.number)
            piece.codec.add_(_typed(wire, piece.codec, out), out, when)

    def put_(self, message: Tensor, outs: Mapping[str, Tensor]) -> None:
        """outs ← the message, to the bit. Raises ValueError where its length is impossible."""
        if message.is_meta:
            return
        for piece, wire in self._wires(message):
            out = piece.of(outs[piece.name])
            out.copy_(piece.codec.decode(_typed(wire, piece.codec, out), out, EncodeContext(0, 0, piece.number)))

    def _wires(self, message: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        lengths = self._sizes
        if not self.fixed:
            if message.numel() < self._head:
                raise ValueError(f"a message of {message.numel()} bytes cannot hold {len(self.pieces)} lengths")
            lengths = message[: self._head].view(torch.int32)[: len(self.pieces)].tolist()
            if any(not 0 <= n <= size for n, size in zip(lengths, self._sizes, strict=True)):
                raise ValueError(f"a message says that its wires have {lengths} bytes; the most are {self._sizes}")
        if self._head + sum(lengths) > message.numel():
            raise ValueError(f"a message has {message.numel()} bytes, and needs {self._head + sum(lengths)}")
        place = self._head
        for piece, length in zip(self.pieces, lengths, strict=True):
            yield piece, message[place : place + length]
            place += length


def write(piece: Piece, x: Tensor, state: CodecState, when: EncodeContext, room: Tensor) -> tuple[int, CodecState]:
    """Encode into `room` (uint8); how many bytes of it are used, padding included, and the next state."""
    codec = piece.codec
    if x.is_meta:  # a simulation that only prices: the longest wire, and nothing in it
        return room.numel(), state
    try:
        wire, state = codec.encode(x, state, when, _typed(room, codec, x))
    except NotFinite as error:
        raise NotFinite(
            error.codec, error.index, error.value, f"{piece.name} (from row {piece.first}) on rank {when.rank}"
        ) from None
    raw = wire.view(torch.uint8)
    if raw.data_ptr() != room.data_ptr():
        room[: raw.numel()].copy_(raw)
    padded = _padded(raw.numel())
    if padded > raw.numel():
        room[raw.numel() : padded] = 0
    return padded, state


def _shape(like: Tensor) -> Tensor:
    """Shape and dtype without the values, which a layout must not keep alive."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _typed(room: Tensor, codec: Codec, like: Tensor) -> Tensor:
    """The bytes in the dtype of the codec's wires; without padding, where their length is known."""
    dtype = codec.wire_dtype(like)
    if codec.facts.fixed:
        room = room[: codec.wire_bytes(like)]
    return room if dtype is torch.uint8 else room.view(dtype)
