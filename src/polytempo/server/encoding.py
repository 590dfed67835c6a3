"""Pushes and pulls, encoded: for each shard one message, of ranges of parameters.

parameters   [ w1 w1 w1 w1 w1 w1 w1 w1 | b1 | w2 w2 w2 ]      w1 has rows of 2, b1 is small
shard 1                     └──────────────────────┘
ranges                      w1[5:6] | w1[6:8] | b1 | w2[0:2]  whole rows, and the rest of a cut row alone
message      [ wire | wire | b1 as it is | wire ]             uint8: the form on the wire, in logs and in records

A codec's groups (1-bit's columns, scales of rows) are rows, so where shards are cut between rows, or a codec has no
groups, the cuts change no bit. A small parameter travels as it is, wherever it is cut.

When elements change their ranges, the codec's state of each element goes with it:

before   [ r r r r r | r r r ]       residuals of two ranges
after    [ r r r | r r r r r ]       a residual is where its element is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.compression.exchange.packing import EXACT_BELOW, Packing, whole
from polytempo.core import Codec, CodecState, NotFinite, PolytempoError, Residual
from polytempo.core.codec import DeltaCodec, PartlyGiven, PullCodec
from polytempo.server.layout import Parameter, Spans, describe
from polytempo.server.tensors.optimizer import can_be_native, first_unfinite

_NOTHING = -0.0
"""The only number that changes none by being added to it, -0.0 included."""
_ALIGNED = 8


class Undecodable(ValueError):
    """A message is not an encoding of this shard's ranges."""


class Overflown(PolytempoError):
    """A worker pulled weights that are NaN or infinite, though every gradient was finite: steps were too large."""


class ParameterRange(NamedTuple):
    """Elements of one parameter that one shard holds."""

    name: str
    """The parameter's, with the elements where they are not all: `w1[6:8]`."""
    begin: int
    """In the shard's own vector."""
    start: int
    """In the flat vector of all parameters."""
    shape: tuple[int, ...]
    is_small: bool
    """True if the whole parameter is small."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    def of(self, vector: Tensor, at: int) -> Tensor:
        """This range of `vector`, where it begins at `at`, in its shape."""
        return vector[at : at + self.numel].view(self.shape)


def ranges(parameters: Sequence[Parameter], spans: Spans) -> tuple[ParameterRange, ...]:
    """Ranges of parameters, not of tables, that make up a shard's own vector."""
    found: list[ParameterRange] = []
    at = 0
    for span in spans:
        start = 0
        for parameter in parameters:
            begin, end = max(span.begin, start), min(span.end, start + parameter.numel)
            if begin >= end:
                start += parameter.numel
                continue
            for first, last, shape in _cuts(parameter, begin - start, end - start):
                is_whole = last - first == parameter.numel
                name = parameter.name if is_whole else f"{parameter.name}[{first}:{last}]"
                place = at + first - (begin - start)
                found.append(
                    ParameterRange(
                        name=name,
                        begin=place,
                        start=start + first,
                        shape=shape,
                        is_small=parameter.numel < EXACT_BELOW,
                    )
                )
            at += end - begin
            start += parameter.numel
    return tuple(found)


def _cuts(parameter: Parameter, begin: int, end: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The elements begin … end-1 as whole rows, and the rest of a row before and after them, with their shapes."""
    rest = parameter.shape[1:]
    width = torch.Size(rest).numel()
    first = min(-(-begin // width) * width, end)
    last = max(end // width * width, first)
    if begin < first:
        yield begin, first, (first - begin,)
    if first < last:
        yield first, last, ((last - first) // width, *rest) if parameter.shape else (last - first,)
    if last < end:
        yield last, end, (end - last,)


class Coding:
    """The layout of one shard's messages. `own`: the vectors are the shard's own, else they hold all parameters."""

    def __init__(
        self, parameters: Sequence[Parameter], spans: Spans, codec: Codec, dtype: torch.dtype, *, own: bool
    ) -> None:
        self.codec = codec
        self.ranges = ranges(parameters, spans)
        self._places = [each.begin if own else each.start for each in self.ranges]
        self.likes = {each.name: torch.empty((), dtype=dtype).expand(each.shape) for each in self.ranges}
        pieces = [
            piece
            for each in self.ranges
            for piece in whole({each.name: self.likes[each.name]}, codec, each.numel + 1 if each.is_small else 0)
        ]
        self.packing = Packing(pieces, self.likes)
        self.states: dict[str, CodecState] = {piece.name: piece.codec.init(self.likes[piece.name]) for piece in pieces}
        """The codec's state of each range before the first message."""

    def encode(
        self, vector: Tensor, states: Mapping[str, CodecState], step: int, rank: int, life: int = 0
    ) -> tuple[Tensor, dict[str, CodecState]]:
        """The message, in memory of its own, and the codec's states after it."""
        message, after = self.packing.encode(self._views(vector), states, step, rank, life)
        return (message if message.numel() == self.packing.num_bytes else message.clone()), after

    def into_(self, message: Tensor, vector: Tensor) -> None:
        """vector ← the decoded message, on the shard's ranges. Raises Undecodable where the message is malformed.

        No context is needed: `server.service` admits only codecs with wires that are complete without one.
        """
        message, views = self._checked(message), self._views(vector)
        for view in views.values():
            view.fill_(_NOTHING)
        with self._decoding():
            self.packing.add_(message, views, step=0, rank=0)

    def put_(self, message: Tensor, vector: Tensor) -> None:
        """The same to the bit, NaN payloads included, for codecs that keep every element."""
        message = self._checked(message)
        with self._decoding():
            self.packing.put_(message, self._views(vector))

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a codec may raise any of these for bytes that it did not make
            raise Undecodable(f"no message of {self.codec.facts.name}: {error}") from error

    def _checked(self, message: Tensor) -> Tensor:
        """`message`, in memory that numbers can be read from. Raises Undecodable."""
        expected = self.packing.num_bytes
        fits = message.numel() == expected if self.packing.fixed else message.numel() <= expected
        if message.dtype is not torch.uint8 or message.dim() != 1 or not fits:
            kind = f"{tuple(message.shape)} of {message.dtype}"
            most = "" if self.packing.fixed else "up to "
            raise Undecodable(
                f"{kind} is not a message of {self.codec.facts.name}, which has {most}{expected} bytes here"
            )
        begins = message.data_ptr(), message.storage_offset()  # torch views bytes as floats only where both are aligned
        if any(place % _ALIGNED for place in begins) or not message.is_contiguous():
            message = message.clone(memory_format=torch.contiguous_format)
        return message

    def _views(self, vector: Tensor) -> dict[str, Tensor]:
        return {each.name: each.of(vector, at) for each, at in zip(self.ranges, self._places, strict=True)}


# ---------------------------------------------------------------------------------------------------- at the worker


def check_finite(flat: Tensor, codings: Sequence[Coding], worker: int) -> None:
    """Raise NotFinite for NaN or an infinity in the vector of all parameters that `worker` pushes."""
    bad = first_unfinite(flat, can_be_native(flat.dtype)) if flat.numel() and not flat.is_meta else -1
    for coding in codings if bad >= 0 else ():
        for each in coding.ranges:
            if 0 <= bad - each.start < each.numel:
                rank = f"{each.name} on rank {worker}"
                raise NotFinite(coding.codec.facts.name, bad - each.start, float(flat[bad]), rank)


class Encoder:
    """Encodes the pushes of `worker` to the shards of `shards`, and keeps the codec's states between pushes.

    A worker that comes back counts its pushes from 0 again; `incarnation` (from 1) gives it other random numbers.

    Cost: one look through the gradient, then the codec's.
    """

    def __init__(
        self,
        codec: Codec,
        parameters: Sequence[Parameter],
        shards: Sequence[Spans],
        dtype: torch.dtype,
        worker: int,
        incarnation: int = 1,
    ) -> None:
        self._codec, self._parameters, self._dtype, self._worker = codec, tuple(parameters), dtype, worker
        self._life = incarnation - 1
        self._codings = self._codings_of(shards)
        self._states = [coding.states for coding in self._codings]
        self._pushes = 0

    @property
    def flops(self) -> float:
        """The cost of encoding a push: half of the codec's cost of encoding and decoding."""
        return sum(coding.packing.flops for coding in self._codings) / 2

    def encode(self, flat: Tensor) -> list[Tensor]:
        """The message to each shard. Raises NotFinite, before anything is changed, where `flat` has such an element."""
        check_finite(flat, self._codings, self._worker)
        self._pushes += 1
        messages = []
        for shard, coding in enumerate(self._codings):
            message, after = coding.encode(flat, self._states[shard], self._pushes, self._worker, self._life)
            self._states[shard] = after
            messages.append(message)
        return messages

    def move(self, shards: Sequence[Spans]) -> None:
        """Shards hold other ranges from now on. The codec's state of an element goes with it."""
        before = [
            RangeState(r.start, r.shape, self._states[s][r.name]) for s, c in enumerate(self._codings) for r in c.ranges
        ]
        self._codings = self._codings_of(shards)
        self._states = [
            {
                each.name: redistribute(before, each.start, each.shape, coding.states[each.name])
                for each in coding.ranges
            }
            for coding in self._codings
        ]

    def residual(self) -> Tensor:
        """The part of each element's gradients that has not been sent yet, flat."""
        total = torch.zeros(sum(parameter.numel for parameter in self._parameters), dtype=self._dtype)
        for coding, states in zip(self._codings, self._states, strict=True):
            for each in coding.ranges:
                for residual in residuals(states[each.name]):
                    each.of(total, each.start).add_(residual)
        return total

    def _codings_of(self, shards: Sequence[Spans]) -> list[Coding]:
        return [Coding(self._parameters, spans, self._codec, self._dtype, own=False) for spans in shards]


class Decoder:
    """Decodes the pulls of a worker from the shards of `shards` into its flat vector."""

    def __init__(
        self, codec: PullCodec, parameters: Sequence[Parameter], shards: Sequence[Spans], dtype: torch.dtype
    ) -> None:
        self._delta = codec if isinstance(codec, DeltaCodec) else None
        self._codec = codec.codec if isinstance(codec, DeltaCodec) else codec
        self._parameters, self._dtype = tuple(parameters), dtype
        self.move(shards)

    @property
    def flops(self) -> float:
        """The cost of decoding a pull."""
        flops = sum(coding.packing.flops for coding in self._codings) / 2
        if self._delta is None:
            return flops
        return flops + 2.0 * sum(each.numel for coding in self._codings for each in coding.ranges)

    def held(self, shard: int) -> int:
        """The version of the shard's message that the worker holds; -1: none that a difference could be added to."""
        return self._held[shard][0]

    def place_(self, flat: Tensor, shard: int, message: Tensor, version: int = -1) -> None:
        """Put the shard's weights, of `version`, into the flat vector. Raises Overflown where one is NaN or infinite,
        and Undecodable."""
        coding, (base, held) = self._codings[shard], self._held[shard]
        self._held[shard] = -1, None
        if message.dtype is not self._dtype or message.shape != (sum(each.numel for each in coding.ranges),):
            if self._delta is not None:
                try:
                    message = self._delta.message(message, held, base, self._dtype)
                except ValueError as error:
                    raise Undecodable(f"shard {shard}: {error}") from error
                self._held[shard] = version, message
            coding.put_(message, flat)
            return
        bad = first_unfinite(message, can_be_native(message.dtype))
        for each in coding.ranges:
            if each.begin <= bad < each.begin + each.numel:
                where = describe(self._parameters, each.start + bad - each.begin)
                raise Overflown(
                    f"shard {shard} holds {float(message[bad])} as {where}, which pull_codec={self._codec.facts.name} "
                    "cannot encode; a step was too large: lower the learning rate, and go on from an earlier snapshot"
                )
            each.of(flat, each.start).copy_(each.of(message, each.begin))

    def move(self, shards: Sequence[Spans]) -> None:
        """Shards hold other ranges from now on."""
        self._codings = [Coding(self._parameters, spans, self._codec, self._dtype, own=False) for spans in shards]
        self._held: list[tuple[int, Tensor | None]] = [(-1, None)] * len(shards)


# ----------------------------------------------------------------------------------------------------- at the shard


class Pushes:
    """Decodes the pushes to a shard into memory that is used again."""

    def __init__(self, coding: Coding, numel: int, dtype: torch.dtype) -> None:
        self._coding, self._numel, self._dtype = coding, numel, dtype
        self._buffers: list[Tensor] = []

    def gradient(self, message: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
        """The gradient, in memory that is none of `kept`: gradients that still wait. Raises Undecodable."""
        free = (buffer for buffer in self._buffers if not any(buffer is other for other in kept))
        buffer = next(free, None)
        if buffer is None:
            buffer = torch.empty(self._numel, dtype=self._dtype)
            self._buffers.append(buffer)
        self._coding.into_(message, buffer)
        return buffer

    def copy(self, message: Tensor) -> Tensor:
        """The gradient in new memory, for an observer."""
        gradient = torch.empty(self._numel, dtype=self._dtype)
        self._coding.into_(message, gradient)
        return gradient


class ShownEncoding:
    """A shard's weights as workers pull them: encoded once for each version.

    Weights that the codec refuses, because a step has made them infinite, travel as they are: the shard must go on, and
    `Decoder` raises the error at the worker that pulls them. `delta`: messages are sent as their difference from the
    weights that the worker pulled last.
    """

    def __init__(self, coding: Coding, delta: DeltaCodec | None = None) -> None:
        self._coding, self._delta = coding, delta
        self._version = -1
        self._message: Tensor | None = None

    def message(self, weights: Tensor, version: int, held: tuple[int, Tensor] | None = None) -> Tensor:
        """Encode `weights`, of `version`, as a message that must not be written to.

        `held`: the version and the weights of the message that the worker holds.
        """
        message = self._whole(weights, version)
        if self._delta is None or message.dtype is not torch.uint8:
            return message
        base, before = (-1, None) if held is None else held
        if before is not None:
            try:
                before, _ = self._coding.encode(before, {}, base, 0)
            except NotFinite:
                before = None
        return self._delta.difference(message, before, base, weights.dtype)

    def _whole(self, weights: Tensor, version: int) -> Tensor:
        if self._message is None or version != self._version:
            try:
                self._message, _ = self._coding.encode(weights, {}, version, 0)
            except NotFinite:
                self._message = weights.clone()
            self._version = version
        return self._message

    def forget(self) -> None:
        """The weights may have changed without a new version."""
        self._message = None


class RangeState(NamedTuple):
    """A codec's state, or a part of it, of the elements from `start` on, seen as `shape`."""

    start: int
    shape: tuple[int, ...]
    state: CodecState


def redistribute(before: Sequence[RangeState], start: int, shape: tuple[int, ...], fresh: CodecState) -> CodecState:
    """The state of the range of `shape` at `start`, made from those `before`. `fresh`: the state of a new range.

    Tensors with one element for each element of the range go element by element, and are as in `fresh` where there was
    none. Of everything else (an adapted threshold) the largest earlier range decides.
    """
    end = start + torch.Size(shape).numel()
    shared = [(min(end, k.start + torch.Size(k.shape).numel()) - max(start, k.start), k) for k in before]
    largest_first = sorted((each for each in shared if each[0] > 0), key=lambda each: -each[0])
    return _redistributed([kept for _, kept in largest_first], start, shape, fresh)


def residuals(state: CodecState) -> Iterator[Tensor]:
    """The residuals in a codec's state."""
    if isinstance(state, PartlyGiven):  # not all that ranks would add up is to be given: `dgc`
        yield from state.given()[0]
    elif isinstance(state, Residual):
        if state.residual is not None:
            yield state.residual
    elif isinstance(state, tuple | dict):
        for part in state.values() if isinstance(state, dict) else state:
            yield from residuals(part)


def _redistributed(before: Sequence[RangeState], start: int, shape: tuple[int, ...], fresh: Any) -> Any:
    if not before:
        return fresh
    if isinstance(fresh, dict):
        return {key: _redistributed(_parts(before, key), start, shape, value) for key, value in fresh.items()}
    if isinstance(fresh, tuple):
        values = [_redistributed(_parts(before, i), start, shape, value) for i, value in enumerate(fresh)]
        return type(fresh)(*values) if hasattr(fresh, "_fields") else tuple(values)
    by_element = [kept for kept in before if isinstance(kept.state, Tensor) and kept.state.shape == kept.shape]
    if by_element:
        return _gathered(by_element, start, shape, fresh)
    first = before[0].state
    fits = not isinstance(fresh, Tensor) or (isinstance(first, Tensor) and first.shape == fresh.shape)
    return first if fits and not (fresh is None and isinstance(first, Tensor)) else fresh


def _parts(before: Sequence[RangeState], key: Any) -> list[RangeState]:
    return [kept._replace(state=kept.state[key]) for kept in before]


def _gathered(before: Sequence[RangeState], start: int, shape: tuple[int, ...], fresh: Tensor | None) -> Tensor:
    like = before[0].state
    out = like.new_zeros(shape) if fresh is None or fresh.shape != shape else fresh.clone()
    flat = out.view(-1)
    for kept in before:
        values = kept.state.reshape(-1)
        begin, end = max(start, kept.start), min(start + flat.numel(), kept.start + values.numel())
        flat[begin - start : end - start] = values[begin - kept.start : end - kept.start]
    return out
