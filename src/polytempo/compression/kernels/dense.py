"""Kernels of the codecs with a code for every element, on contiguous float32 tensors of the CPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from polytempo.compression.encoding.blocks import Parts, tree
from polytempo.compression.encoding.coded import Encoding, Kernels, from_zeros
from polytempo.compression.encoding.values import refuse, room, whole
from polytempo.core import EncodeContext
from polytempo.native.kernels import codes_dense


class CastEncoding(Encoding, Protocol):
    """`fp16` and `bf16`."""

    def limit(self, terms: int) -> float:
        """The largest magnitude of which that many have a finite sum."""


class BlockEncoding(Encoding, Protocol):
    """`int8` and `dynamic8`."""

    @property
    def block(self) -> int:
        """Elements that share a scale."""

    def parts(self, wire: Tensor, like: Tensor) -> Parts:
        """A wire's scales and codes."""


class BitEncoding(Encoding, Protocol):
    """`one_bit` and `sign`."""

    def row_length(self, like: Tensor) -> int:
        """Elements that share their two numbers."""

    def pairs(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """What bits 0 and 1 mean, for each row, and the words of bits."""

    def parts(self, wire: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers on the wire, float32, and the words of bits."""


class SignEncoding(BitEncoding, Protocol):
    """`sign`."""

    def turned(self, x: Tensor, when: EncodeContext) -> Tensor:
        """x, with a sign for what has none."""


def _fits(*tensors: Tensor) -> bool:
    return codes_dense.fits(*tensors)


def _fits_some(*tensors: Tensor) -> bool:
    return tensors[0].numel() > 0 and codes_dense.fits(*tensors)


def _fits_alone(x: Tensor, residual: Tensor | None = None) -> bool:
    return residual is None and _fits_some(x)


def _room(encoding: Encoding, x: Tensor, out: Tensor | None) -> Tensor:
    num_bytes, dtype = encoding.size(x)
    return room(encoding.facts.name, num_bytes, x, out, dtype)


def _encode_cast(
    encoding: CastEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = _room(encoding, x, out)
    bad = codes_dense.cast_(x, residual, encoding.limit(when.terms), wire)
    if residual is not None:
        refuse(encoding.facts.name, bad, x, residual)
    return wire


def _add_cast_(encoding: CastEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    codes_dense.add_cast_(whole(encoding.facts.name, wire, out, out.numel(), encoding.size(out).dtype), out)


CAST = Kernels(_fits, _add_cast_, None, _fits, _encode_cast)


def _encode_int8(
    encoding: BlockEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = _room(encoding, x, out)
    parts = encoding.parts(wire, x)
    parts.padding.zero_()
    bad = codes_dense.int8_(x, residual, encoding.block, parts.scales, parts.codes)
    refuse(encoding.facts.name, bad, x, residual)
    return wire


def _add_int8_(encoding: BlockEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    parts = encoding.parts(wire, out)
    codes_dense.add_int8_(parts.scales, parts.codes, encoding.block, out)


INT8 = Kernels(_fits, _add_int8_, from_zeros(_add_int8_), _fits, _encode_int8)


def _encode_dynamic8(
    encoding: BlockEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = _room(encoding, x, out)
    parts = encoding.parts(wire, x)
    parts.padding.zero_()
    bad = codes_dense.dynamic8_(x, residual, encoding.block, tree(), parts.scales, parts.codes)
    refuse(encoding.facts.name, bad, x, residual)
    return wire


def _add_dynamic8_(encoding: BlockEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    parts = encoding.parts(wire, out)
    codes_dense.add_dynamic8_(parts.scales, parts.codes, encoding.block, tree(), out)


DYNAMIC8 = Kernels(_fits, _add_dynamic8_, from_zeros(_add_dynamic8_), _fits, _encode_dynamic8)


def _encode_one_bit(
    encoding: BitEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = _room(encoding, x, out)
    means, words = encoding.parts(wire, x)
    bad = codes_dense.one_bit_(x, residual, means, words, encoding.row_length(x))
    refuse(encoding.facts.name, bad, x, residual)
    return wire


def _add_bits_(encoding: BitEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    means, words = encoding.pairs(wire, out)
    codes_dense.add_one_bit_(means, words, out, encoding.row_length(out))


ONE_BIT = Kernels(_fits, _add_bits_, from_zeros(_add_bits_), _fits, _encode_one_bit)


def _encode_sign(
    encoding: SignEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    wire = _room(encoding, x, out)
    scale, words = encoding.parts(wire, x)
    given = encoding.turned(x, when)
    bad = codes_dense.sign_(given, residual, scale if scale.numel() else None, words)
    refuse(encoding.facts.name, bad, given, residual)
    return wire


SIGN = Kernels(_fits_some, _add_bits_, from_zeros(_add_bits_), _fits_some, _encode_sign)
VOTE = Kernels(_fits_some, _add_bits_, from_zeros(_add_bits_), _fits_alone, _encode_sign)
"""Of `sign(scaled=False)`, whose zeros take turns: with a residual it has to see the sum first."""
