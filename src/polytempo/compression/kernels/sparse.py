"""Kernels of the codecs that send a few elements, on contiguous float32 tensors of the CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import Encoding, Kernels, add_decoded_, from_zeros, placed
from polytempo.compression.encoding.values import refuse, room
from polytempo.core import EncodeContext
from polytempo.native.kernels import codes_sparse


class LargestEncoding(Encoding, Protocol):
    """`top_k`."""

    def num_sent(self, like: Tensor) -> int:
        """k."""

    def plain_bytes(self, like: Tensor) -> int:
        """Of k indices and k values."""

    def sent(self, plain: Tensor, x: Tensor) -> Tensor:
        """The wire made of these."""

    def opened(self, wire: Tensor, like: Tensor) -> tuple[int, int, int]:
        """Where indices and values begin on a wire, and bytes of compressed indices."""


class OverEncoding(Encoding, Protocol):
    """`threshold`."""

    def tau_of(self, x: Tensor, residual: Tensor | None, when: EncodeContext) -> float:
        """τ for x + residual."""

    def headed(self, count: int, tau: float, like: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        """A wire with its header, the words behind it, and whether they are a map."""

    def opened(self, wire: Tensor, like: Tensor) -> tuple[Tensor, float, bool]:
        """A wire's words, τ, and whether the words are a map."""


def _serves(*tensors: Tensor) -> bool:
    return codes_sparse.serves(*tensors)


def _encode_top_k(
    encoding: LargestEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
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


def _add_top_k_(encoding: LargestEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    start, end, length = encoding.opened(wire, out)
    if length:
        add_decoded_(encoding.decode(wire, out, when), out, encoding.facts.name)
    elif not codes_sparse.add_entries(out, wire[start:], wire[end:], encoding.num_sent(out)):
        raise ValueError(f"a wire of {encoding.facts.name} has an index beyond the tensor's {out.numel()} elements")


TOP_K = Kernels(_serves, _add_top_k_, from_zeros(_add_top_k_), _serves, _encode_top_k)


def _encode_threshold(
    encoding: OverEncoding, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None
) -> Tensor:
    tau = encoding.tau_of(x, residual, when)
    count, bad = codes_sparse.SourceArrays(x, residual).count_over(tau)
    refuse(encoding.facts.name, bad, x, residual)
    wire, words, is_map = encoding.headed(count, tau, x, out)
    codes_sparse.pack_threshold(x, residual, tau, is_map, words)
    return wire


def _add_threshold_(encoding: OverEncoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    words, tau, is_map = encoding.opened(wire, out)
    if not codes_sparse.add_threshold(out, words, tau, is_map):
        raise ValueError(f"a wire of {encoding.facts.name} has entries that a tensor of {out.numel()} elements has not")


THRESHOLD = Kernels(_serves, _add_threshold_, from_zeros(_add_threshold_), _serves, _encode_threshold)


def add_entries_(codec: str, wire: Tensor, out: Tensor) -> None:
    """out += what a wire of `compression.entries` says: a list by the kernel, the other forms by torch."""
    form, count, head = entries.opened(wire, out, codec)
    if form != entries.LIST or not codes_sparse.serves(out):
        add_decoded_(entries.read(wire, out, codec), out, codec)
    elif not codes_sparse.add_entries(out, wire[entries.HEADER_BYTES :], wire[head:], count):
        raise ValueError(f"a wire of {codec} has an index beyond the tensor's {out.numel()} elements")


def _add_entries_(encoding: Encoding, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    add_entries_(encoding.facts.name, wire, out)


ENTRIES = Kernels(_serves, _add_entries_, from_zeros(_add_entries_))
"""Of codecs that only decode natively."""
