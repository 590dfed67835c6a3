"""Messages as frames, and frames as messages.

frame 0        │ version │ msgpack: ["Push", 0, 1, 7, …, [code, shape, 1], [[0, [code, shape, 2], …]]] │
frame 1, 2, …  │ the bytes of a tensor, as in memory │
the last n     │ the rest of a header that is longer than a part; then frame 0 begins │ version + 128 │ n │

A tensor stands in the header as `[dtype, shape, frame]`, or, in memory that both sides share, as
`[arena, offset, dtype, shape]` (but for bools). Nothing is copied in either direction. Over TCP a large one is cut into
frames, `[dtype, shape, first frame, frames]` (see `wire.message_parts`); there it is copied once, when it has arrived.
The schema is fixed: a header holds a message that `server.message` or `flexrr.slices` declares. Every length is
compared with its limit before memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol, Union

import msgspec
import torch
from torch import Tensor

from polytempo.server.message import Message
from polytempo.wire.message_parts import PART_BYTES, Frame, cut

VERSION = 3
"""The protocol's version. A header of another version is refused."""
_CUT = 128

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MAX_DIMS = 8
_REASON_LENGTH = 200


class Malformed(ValueError):
    """Frames that are not a message of this protocol. The only error that `decode` raises."""


@dataclass(frozen=True)
class FrameLimits:
    """The largest message."""

    total_bytes: int = 4 << 30
    header_bytes: int = 4 << 20
    num_frames: int = 1 << 16


_HEADROOM_BYTES = 16 << 20
_MOST_TENSORS = 4096


def limits_of(most_bytes: int) -> FrameLimits:
    """The limits where no message carries tensors of more than `most_bytes`, in all."""
    total_bytes = most_bytes + _HEADROOM_BYTES
    return FrameLimits(total_bytes=total_bytes, num_frames=total_bytes // PART_BYTES + _MOST_TENSORS)


class References(Protocol):
    """Memory that both sides share: `wire.shared.Arenas`."""

    def reference(self, tensor: Tensor) -> tuple[int, int] | None:
        """(arena, offset) of a tensor in it; None for any other."""

    def resolve(self, arena: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor there. ValueError where it would not be inside the arena."""


def encode(message: Message, references: References | None = None, part_bytes: int | None = None) -> list[Frame]:
    """`message` as frames. `part_bytes`: no frame is larger.

    The frames after the first *are* the tensors' memory: leave it unchanged until the message has left. A shard and its
    workers do so by their contract: gradients are lent until the push is answered, weights until the next request. The
    gradient of a push that is sent again after its answer may change; the shard drops it by its number, unread.
    Errors: ValueError for a tensor that is not a dense one in main memory, or of a dtype that the protocol lacks.
    """
    frames: list[Frame] = [b""]

    def described(tensor: Any) -> list[Any]:
        if not isinstance(tensor, Tensor) or tensor.dtype not in _CODES or tensor.device.type != "cpu":
            raise ValueError(f"only tensors in main memory of {list(_CODES)} travel, got {_kind(tensor)}")
        if tensor.layout is not torch.strided or tensor.dim() > _MAX_DIMS:
            raise ValueError(f"only dense tensors of up to {_MAX_DIMS} dimensions travel, got {_kind(tensor)}")
        code, shape = _CODES[tensor.dtype], list(tensor.shape)
        if references is not None and tensor.is_contiguous() and tensor.dtype is not torch.bool:
            place = references.reference(tensor)
            if place is not None:
                return [*place, code, shape]
        first, flat = len(frames), tensor.detach().contiguous().view(-1)
        whole = flat.view(torch.uint8).numpy().data
        if part_bytes is None or whole.nbytes <= part_bytes:
            frames.append(whole)
            return [code, shape, first]
        frames.extend(cut(whole, part_bytes))
        return [code, shape, first, len(frames) - first]

    frames[0] = bytes([VERSION]) + msgspec.msgpack.Encoder(enc_hook=described).encode(message)
    if part_bytes is None or len(frames[0]) <= part_bytes:
        return frames
    first, *rest = cut(frames[0][1:], part_bytes - 2)
    frames[0] = bytes([_CUT + VERSION, len(rest)]) + first
    return [*frames, *rest]


def decode(frames: Sequence[Frame], limits: FrameLimits, references: References | None = None) -> Message:
    """The message of `frames`. Its tensors are in the frames' memory, or in the shared memory that they refer to.

    A frame that may not be written to, or is not aligned for its dtype, is copied.
    Errors: Malformed, and no other, for any frames.
    """
    try:
        reader = _Reader(frames, limits, references)
        token = _reading.set(reader)
        try:
            message: Message = _decoder(Message.num_kinds).decode(reader.header)
        finally:
            _reading.reset(token)
        reader.finish()
        return message
    except Malformed:
        raise
    except Exception as error:  # msgspec's own, RecursionError, torch's for impossible shapes
        raise Malformed(f"{type(error).__name__}: {error}"[:_REASON_LENGTH]) from error


class _Reader:
    """The frames of one message, while its header is read."""

    def __init__(self, frames: Sequence[Frame], limits: FrameLimits, references: References | None) -> None:
        if not 1 <= len(frames) <= limits.num_frames:
            raise Malformed(f"a message has 1 to {limits.num_frames} frames, not {len(frames)}")
        head, rest = memoryview(frames[0]), 0
        if not 1 <= len(head) <= limits.header_bytes:
            raise Malformed(f"a header has 1 to {limits.header_bytes} bytes, not {len(head)}")
        if (total := sum(map(len, frames))) > limits.total_bytes:
            raise Malformed(f"a message has up to {limits.total_bytes} bytes, not {total}")
        if head[0] & ~_CUT != VERSION:
            raise Malformed(f"version {head[0] & ~_CUT} of the protocol, this is version {VERSION}")
        self.header: Frame = head[1:]
        if head[0] & _CUT:
            rest = head[1] if len(head) > 1 else 0
            if not 1 <= rest < len(frames) or sum(map(len, frames[-rest:])) + len(head) > limits.header_bytes:
                raise Malformed(f"a header in {rest} frames more, or one of more than {limits.header_bytes} bytes")
            self.header = b"".join([head[2:], *frames[-rest:]])
        self._frames = frames[: len(frames) - rest]
        self._limits, self._references = limits, references
        self._next = 1

    def finish(self) -> None:
        """Refuse frames that belong to no tensor."""
        if self._next != len(self._frames):
            raise Malformed(f"{len(self._frames)} frames, but the header speaks of {self._next}")

    def tensor(self, descriptor: Any) -> Tensor:
        """The tensor that a descriptor stands for."""
        match descriptor:
            case [code, shape, number]:
                return self._sent(*self._checked(code, shape), number)
            case [code, list() as shape, number, parts]:
                return self._joined(*self._checked(code, shape), number, parts)
            case [arena, offset, code, shape] if type(arena) is type(offset) is int and self._references is not None:
                dtype, checked, _ = self._checked(code, shape)
                if dtype is torch.bool:
                    raise Malformed("bools travel as bytes: in shared memory one could become another than 0 or 1")
                return self._references.resolve(arena, offset, checked, dtype)
        raise Malformed("no descriptor of a tensor, or a reference where no memory is shared")

    def _checked(self, code: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...], int]:
        """Dtype, shape and number of bytes."""
        if type(code) is not int or not 0 <= code < len(_DTYPES):
            raise Malformed("no dtype has this code")
        if type(shape) is not list or len(shape) > _MAX_DIMS or any(type(length) is not int for length in shape):
            raise Malformed(f"a shape is a list of up to {_MAX_DIMS} whole numbers")
        size = _DTYPES[code].itemsize
        # Dimensions of length 0 aside, so that strides stay small as well.
        if min(shape, default=0) < 0 or prod(max(1, length) for length in shape) * size > self._limits.total_bytes:
            raise Malformed("a shape with negative lengths, or larger than any message")
        return _DTYPES[code], tuple(shape), prod(shape) * size

    def _sent(self, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int, number: Any) -> Tensor:
        if type(number) is not int or number != self._next or number >= len(self._frames):
            raise Malformed("tensors are in frames 1, 2, 3, … in the header's order")
        self._next += 1
        frame = memoryview(self._frames[number])
        if frame.nbytes != num_bytes:
            raise Malformed(f"frame {number} has {frame.nbytes} bytes, its tensor {num_bytes}")
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(bytearray(frame) if frame.readonly else frame, dtype=torch.uint8)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return _shaped(flat, dtype, shape)

    def _joined(self, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int, number: Any, parts: Any) -> Tensor:
        """The tensor in several frames."""
        if type(number) is not int or type(parts) is not int or number != self._next or parts < 2:
            raise Malformed(
                "tensors are in frames 1, 2, 3, … in the header's order, the parts of one behind each other"
            )
        self._next += parts
        frames = [memoryview(frame) for frame in self._frames[number : self._next]]
        if len(frames) != parts or not all(frame.nbytes for frame in frames):
            raise Malformed(f"{parts} frames from {number} on are not there, or one of them is empty")
        if (found := sum(frame.nbytes for frame in frames)) != num_bytes:
            raise Malformed(f"frames {number} to {self._next - 1} have {found} bytes, their tensor {num_bytes}")
        flat, at = torch.empty(num_bytes, dtype=torch.uint8), 0
        view = flat.numpy().data
        for frame in frames:
            view[at : at + frame.nbytes] = frame
            at += frame.nbytes
        return _shaped(flat, dtype, shape)


def _shaped(flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype is torch.bool and int(flat.max()) > 1:
        raise Malformed("a bool is 0 or 1")
    return flat.view(dtype).view(shape)


_reading: ContextVar[_Reader] = ContextVar("_reading")
"""The message that `_decoder` reads now. A decoder for each message would cost more than most messages do."""


def _tensor(_: type, descriptor: Any) -> Tensor:
    return _reading.get().tensor(descriptor)


def _kinds(kind: type[Message]) -> Iterator[type[Message]]:
    """Every message class without subclasses."""
    derived = kind.__subclasses__()
    if not derived:
        yield kind
    for each in derived:
        yield from _kinds(each)


@cache
def _decoder(num_kinds: int) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of every kind of message that has been imported by now: `num_kinds` tells them apart from another
    kind of run in this process. Made when it is first needed."""
    return msgspec.msgpack.Decoder(Union[tuple(_kinds(Message))], dec_hook=_tensor)  # noqa: UP007


def _kind(value: Any) -> str:
    return f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
