"""`Coded`: an encoding in plain torch, with the kernels that do the same faster, as a `Codec`.

             kernels serve these tensors?   yes ──▶ Kernels.encode(x, residual) ───▶ wire, and residual in the same pass
encode(x) ──▶                               no  ──▶ Encoding.encode(x + residual) ─▶ wire; residual ← v - decode(wire)

The kernels write the bits of the encoding (`tests/native` holds them to it), so which of the two ran cannot be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polytempo.compression.encoding.values import check_finite, check_flat, check_kind, room, whole
from polytempo.core import ALONE, Codec, CodecState, EncodeContext, Facts, Law


class WireSize(NamedTuple):
    """Bytes of a wire (the most, where it is not fixed), and the type of its elements."""

    num_bytes: int
    dtype: torch.dtype = torch.uint8


class Entries(NamedTuple):
    """A tensor that is 0 but for `values` at the flat `indices` (int64)."""

    indices: Tensor
    values: Tensor


class Encoding(Protocol):
    """A codec without memory, in plain torch: all that a new codec has to write. A value: a frozen dataclass."""

    @property
    def facts(self) -> Facts:
        """The codec's properties."""

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """Size of the wire of a tensor like this, or of a sum of `terms` wires, where they may be added.

        Raises ValueError for a tensor that is too large for a wire.
        """

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """The wire, flat; a view of x may do. Raises NotFinite, where the facts do not say that it passes."""

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor | Entries:
        """x̂, shaped like `like`, of any dtype that holds it (a view of the wire may do); or its entries.

        Raises ValueError for a wire that no such tensor has.
        """


class Kernels(NamedTuple):
    """Native code of an encoding, which is the first argument of `add_`, `decode` and `encode`."""

    decodes: Callable[[Tensor], bool]
    """`decodes(like)`: whether `add_` and `decode` take such a tensor."""
    add_: Callable[[Any, Tensor, Tensor, EncodeContext], None]
    """`add_(encoding, wire, out, when)`: out += decode(wire)."""
    decode: Callable[[Any, Tensor, Tensor, EncodeContext], Tensor] | None = None
    """`decode(encoding, wire, like, when)`: x̂. None: by torch."""
    encodes: Callable[..., bool] = lambda *tensors: False
    """`encodes(x)`, `encodes(x, residual)`: whether `encode` takes these tensors."""
    encode: Callable[[Any, Tensor, Tensor | None, EncodeContext, Tensor | None], Tensor] | None = None
    """`encode(encoding, x, residual, when, out)`: the wire of v = x + residual, and residual ← v - decode(wire).

    Raises NotFinite, and ValueError for an `out` that is too small, before anything has changed. None: by torch."""

    def or_else(self, other: Kernels) -> Kernels:
        """Take `other` where these kernels do not fit. Both have all five functions."""

        def add_(encoding: Encoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
            (self if self.decodes(out) else other).add_(encoding, wire, out, when)

        def decode(encoding: Encoding, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
            chosen = (self if self.decodes(like) else other).decode
            assert chosen is not None, "the rule of `or_else`"
            return chosen(encoding, wire, like, when)

        def encode(
            encoding: Encoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
        ) -> Tensor:
            given = (x,) if residual is None else (x, residual)
            chosen = (self if self.encodes(*given) else other).encode
            assert chosen is not None, "the rule of `or_else`"
            return chosen(encoding, x, residual, when, out)

        return Kernels(
            lambda like: self.decodes(like) or other.decodes(like),
            add_,
            decode,
            lambda *tensors: self.encodes(*tensors) or other.encodes(*tensors),
            encode,
        )


def from_zeros(add_: Callable[[Any, Tensor, Tensor, EncodeContext], None]) -> Callable[..., Tensor]:
    """Decoding by adding to zeros."""

    def decode(encoding: Encoding, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        found = torch.zeros_like(like, memory_format=torch.contiguous_format)
        add_(encoding, wire, found, when)
        return found

    return decode


@dataclass(frozen=True, repr=False)
class Coded:
    """A codec without memory. `kernels` None: torch does it all."""

    encoding: Encoding
    kernels: Kernels | None = None

    def __repr__(self) -> str:
        return self.facts.name

    @property
    def facts(self) -> Facts:
        """The encoding's."""
        return self.encoding.facts

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """The type of a wire's elements."""
        return self.encoding.size(like, terms).dtype

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """Bytes of a wire; where it is not fixed, the most."""
        return self.encoding.size(like, terms).num_bytes

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """The number that ranks must agree on before they encode."""
        if self.facts.statistic is None:
            return None
        check_kind(x)
        return self.facts.statistic(x)

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The wire of x."""
        check_kind(x)
        x = x.detach()
        kernels = self.kernels
        if kernels is not None and kernels.encode is not None and kernels.encodes(x):
            return kernels.encode(self.encoding, x, None, when, out), state
        wire = self.encoding.encode(x, when)
        return (_own(wire, x) if out is None else placed(self.facts.name, wire, out)), state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """The wire of v = x + residual; then residual ← v - decode(wire). x stays as it is.

        Raises NotFinite, also where NaN and infinities may pass without a residual: in it they would stay for ever.
        Then everything is as it was (if the residual itself is not finite, or so large that it overflows with a small
        x, earlier parts of it may have been encoded).
        """
        check_kind(x)
        x = x.detach()
        kernels = self.kernels
        if kernels is not None and kernels.encode is not None and kernels.encodes(x, residual):
            return kernels.encode(self.encoding, x, residual, when, out), state
        self.encoding.size(x)  # refuses too large tensors before memory is taken for v
        v = x + residual
        if self.facts.passes_nonfinite:
            check_finite(self.facts.name, v)
        wire, state = self.encode(v, state, when, out)
        residual.copy_(self._left(v, wire, when))
        return wire, state

    def _left(self, v: Tensor, wire: Tensor, when: EncodeContext) -> Tensor:
        """v - decode(wire); of entries without a dense tensor in between."""
        found = self.encoding.decode(wire, v, when) if self.facts.sparse else None
        if not isinstance(found, Entries):
            return v - decoded_alone(self, wire, v, when)
        flat = v.reshape(-1)
        flat[found.indices] -= found.values
        return flat.view(v.shape)

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """x̂."""
        if self.kernels is not None and self.kernels.decode is not None and self.kernels.decodes(like):
            return self.kernels.decode(self.encoding, wire, like, when)
        found = self.encoding.decode(wire, like, when)
        if isinstance(found, Tensor):
            return _own(found.to(like.dtype), wire)
        out = torch.zeros_like(like, memory_format=torch.contiguous_format)
        add_decoded_(found, out, self.facts.name)
        return out

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """Add x̂ to out. Raises ValueError, and adds nothing, for a wire that no such tensor has."""
        if self.kernels is not None and self.kernels.decodes(out):
            self.kernels.add_(self.encoding, wire, out, when)
            return
        add_decoded_(self.encoding.decode(wire, out, when), out, self.facts.name)


def room_for(encoding: Encoding, x: Tensor, out: Tensor | None) -> Tensor:
    """Memory for a wire of x: the beginning of `out` where there is one."""
    num_bytes, dtype = encoding.size(x)
    return room(encoding.facts.name, num_bytes, x, out, dtype)


def placed(codec: str, wire: Tensor, out: Tensor) -> Tensor:
    """`wire`, in the beginning of `out`. Raises ValueError where it does not fit."""
    check_flat(f"memory for a wire of {codec}", out, wire.device, wire.dtype)
    if out.numel() < wire.numel():
        raise ValueError(f"out has {out.nbytes} bytes, and a wire of {codec} needs {wire.nbytes}")
    return out[: wire.numel()].copy_(wire)


def _own(found: Tensor, source: Tensor) -> Tensor:
    """`found`, in memory of its own."""
    return found.clone() if found.data_ptr() == source.data_ptr() else found


def decoded_alone(codec: Codec, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
    """The tensor of a wire; a wire for a sum is decoded in a sum with wires of zeros."""
    if when.terms > 1 and codec.facts.summable:
        nothing, _ = codec.encode(torch.zeros_like(like), codec.init(like), when)
        wire = wire + (when.terms - 1) * nothing
    return codec.decode(wire, like, when)


def add_decoded_(decoded: Tensor | Entries, out: Tensor, codec: str) -> None:
    """Add a tensor, or its entries, to out. Raises ValueError, and adds nothing, where an index is beyond out."""
    if isinstance(decoded, Tensor):
        out.add_(decoded)
        return
    indices, values = decoded
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= out.numel()):
        raise ValueError(
            f"a wire of {codec} has indices from {int(indices.min())} to {int(indices.max())}, and the tensor "
            f"{out.numel()} elements"
        )
    flat = out.reshape(-1)
    flat.index_add_(0, indices, values.to(out.dtype))
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def exact() -> Coded:
    """x̂ = x: K bytes for K bytes.

    An all-reduce of 16-bit tensors adds in 16 bits: it rounds each partial sum, and one beyond their range is infinite,
    as 3 · (65504 / 3) in float16, because its parts are rounded up. `route=pt.compression.all_gather` adds in float32.
    """
    return Coded(Exact())


@dataclass(frozen=True)
class Exact:
    """See `exact`."""

    @cached_property
    def facts(self) -> Facts:
        """x̂ = x, bit by bit."""
        return Facts("exact()", Law("lossless"), flops=1.0, summable=True, elementwise=True, passes_nonfinite=True)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """The tensor's."""
        return WireSize(like.numel() * like.element_size(), like.dtype)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """The values, flat."""
        return x.reshape(-1)

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """The values, in their shape."""
        return whole("exact()", wire, like, like.numel(), like.dtype).view(like.shape)
