"""Strom's threshold: every element beyond ±τ sends ±τ, and keeps the rest.

Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015, sections 3 and 4; the
bitmap for dense tensors is from Deeplearning4j's gradient sharing; a τ that sends a given share is from N. Dryden
et al., "Communication quantization for data-parallel training of deep neural networks", 2016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import Coded, Entries, Kernels, WireSize, from_zeros
from polytempo.compression.encoding.values import check_finite, refuse, room
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real
from polytempo.native.kernels import codes_sparse
from polytempo.native.kernels.codes_sparse import serves

_HEADER = "<If"
_HEADER_BYTES = 8
_MAP = 2**31
_SAMPLE, _OVER = 1024, 64
"""τ is found among every 1024th element, or more: as many as have 64 that are expected to be over it."""
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def threshold(tau: float = 1e-3, density: float | None = None) -> Coded:
    """Every |vᵢ| > τ sends ±τ, not its value; with `feedback`, r ← v ∓ τ once, so larger values go several times.

        wire   | count, and 1 bit for the form (4 bytes) | τ (float32) |
        list   | 31 bits of index, 1 of sign             | …                            4 · count bytes
        map    | 16 bits: above τ, 16 bits: below -τ     | … a word for 16 elements     4 · ⌈n/16⌉ bytes

    The shorter form is taken, so the most is 8 + 4⌈n/16⌉ bytes, a 16th of float32 (Strom's has the list only; the map
    is Deeplearning4j's, with other bits). Law: "conserving". Use it as `feedback(threshold(…))`: alone it loses.

    tau: in the encoded tensor's units. In `through` that is share · gradient, this rank's part of the mean, so for N
    equal ranks τ = τ_gradient / N. Strom encodes weight updates, lr · gradient, and adds up all workers': for
    the same entries his τ is lr · N times ours. Under a schedule his sends fewer as lr falls; ours does not notice.
    Too small a τ (|v| stays far above) makes the residual grow: nothing is lost, but it is late.

    density: the share of elements that shall be sent; then τ is the largest number that this share of a sample of v is
    over (every 1024th element, and at least 64 / density), and `tau` only where the whole sample is 0. Equal elements
    are sent together, and there may be many. A τ that follows the number sent before would not do: residuals pile up
    just below τ, so that a step with a slightly smaller one sends nearly all. Each rank adapts for itself, and each
    wire has its τ, so nothing is lost. Deviation: Dryden et al. have a τ and a value for either sign.

    float64 is compared and sent with τ rounded to float32; 16-bit tensors with τ rounded to their own type. Cost with
    a residual: x and r are read twice and r written once; with `density` the sample is read, too.
    Raises ValueError for τ <= 0, a density not in (0, 1], or a tensor of 2^31 elements or more, and NotFinite for NaN
    and infinities; the last two before anything has changed.
    """
    check_real(tau=tau, density=1 if density is None else density)
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, got {tau}")
    if density is not None and not 0 < density <= 1:
        raise ValueError(f"density is a share of the elements, over 0 and at most 1, got {density}")
    return Coded(Threshold(tau, density), _KERNELS)


@dataclass(frozen=True)
class Threshold:
    """See `threshold`."""

    tau: float
    density: float | None

    @cached_property
    def facts(self) -> Facts:
        """A single tensor may lose everything (|x| <= τ); with feedback nothing is lost."""
        name = codec_name(threshold, self, brief=("density",))
        return Facts(name, Law("conserving"), flops=3.0, sparse=True, fixed=False)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """8 + 4⌈n/16⌉ bytes at most: a bitmap."""
        entries.check_count(self.facts.name, like.numel())
        return WireSize(_HEADER_BYTES + 4 * _words(like.numel()))

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """±τ where |x| > τ."""
        tau = self.tau_of(x, None, when)
        check_finite(self.facts.name, x)
        v = x.reshape(-1)
        signs = (v > tau).to(torch.int8) - (v < -tau).to(torch.int8)
        wire, _, is_map = self.headed(int(signs.count_nonzero()), tau, x, None)
        entries.put(wire, _HEADER_BYTES, _mapped(signs) if is_map else _listed(signs))
        return wire

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Entries:
        """τ and -τ at their places."""
        words, tau, is_map = self.opened(wire, like)
        codes = entries.taken(words, 0, words.numel() // 4, torch.int32).long()
        listed = codes & (_MAP - 1), torch.where(codes < 0, -1, 1)
        indices, signs = self._unmapped(codes, like.numel()) if is_map else listed
        return Entries(indices, signs.to(like.dtype) * tau)

    def tau_of(self, x: Tensor, residual: Tensor | None, when: EncodeContext) -> float:
        """τ for x + residual, as a float32 that x can hold, too."""
        entries.check_count(self.facts.name, x.numel())
        return _representable(self.tau if self.density is None else self._adapted(x, residual, when), x.dtype)

    def headed(self, count: int, tau: float, like: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        """A wire with nothing but its header, the words behind it, and whether they are a map: if a list is longer."""
        num_words = _words(like.numel())
        is_map = count > num_words
        num_bytes = _HEADER_BYTES + 4 * (num_words if is_map else count)
        wire = room(self.facts.name, num_bytes, like, out, torch.uint8)
        entries.put_header(wire, _HEADER, count + _MAP * is_map, tau)
        return wire, wire[_HEADER_BYTES:], is_map

    def opened(self, wire: Tensor, like: Tensor) -> tuple[Tensor, float, bool]:
        """A wire's words, as bytes; τ; and whether the words are a map. Raises ValueError for an impossible wire."""
        entries.check_wire(self.facts.name, wire, like)
        head, tau = entries.header(wire, _HEADER, self.facts.name)
        is_map, count = head >= _MAP, int(head) % _MAP
        num_words = _words(like.numel()) if is_map else count
        if count > like.numel() or wire.numel() < _HEADER_BYTES + 4 * num_words or not 0 < tau < math.inf:
            raise ValueError(
                f"a wire of {self.facts.name} with {wire.numel()} bytes says that it has {count} entries of {tau}, for "
                f"{like.numel()} elements"
            )
        return wire[_HEADER_BYTES : _HEADER_BYTES + 4 * num_words], tau, is_map

    def _adapted(self, x: Tensor, residual: Tensor | None, when: EncodeContext) -> float:
        """The τ just below the magnitude of the share `density` of the sample."""
        assert self.density is not None, "only then τ adapts"
        count = max(-(-x.numel() // _SAMPLE), math.ceil(_OVER / self.density))
        sample = entries.sampled(x, count, when)
        if residual is not None:
            sample = sample + entries.sampled(residual, count, when)
        if not sample.numel():
            return self.tau
        largest = sample.abs().topk(math.ceil(self.density * sample.numel())).values
        over = largest[largest > 0][-1:]
        return _below(over) if bool(over.isfinite().all()) and over.numel() else self.tau

    def _unmapped(self, words: Tensor, n: int) -> tuple[Tensor, Tensor]:
        shifts = torch.arange(16, device=words.device)
        up, down = ((words.view(-1, 1) >> (shifts + first) & 1).view(-1) for first in (0, 16))
        if bool((up & down).any()) or bool((up | down)[n:].any()):
            raise ValueError(f"a wire of {self.facts.name} has entries that a tensor of {n} elements has not")
        indices = (up | down).nonzero().view(-1)
        return indices, (up - down)[indices]


def _words(n: int) -> int:
    """Words of a bitmap."""
    return -(-n // 16)


def _representable(tau: float, dtype: torch.dtype) -> float:
    """τ as a float32 that the tensor can hold, too: the sent value is the residual's change, to the bit."""
    like = torch.float32 if dtype is torch.float64 else dtype
    limits = torch.finfo(like)
    return float(torch.tensor(min(max(tau, limits.tiny), limits.max), dtype=like))


def _below(largest: Tensor) -> float:
    """The next number of a wire below `largest` (1,), which is over 0."""
    like = torch.float32 if largest.dtype is torch.float64 else largest.dtype
    bits = largest.to(like).view(_INTEGERS[like]) - 1
    return float(bits.view(like))


def _listed(signs: Tensor) -> Tensor:
    """Indices, the highest bit set where the sign is negative."""
    indices = signs.nonzero().view(-1)
    return torch.where(signs[indices] < 0, indices - _MAP, indices).to(torch.int32)


def _mapped(signs: Tensor) -> Tensor:
    """16 elements become a word: the lower half has bits where they go up, the upper where they go down."""
    whole = torch.zeros(16 * _words(signs.numel()), dtype=torch.int64, device=signs.device)
    whole[: signs.numel()] = signs
    weights = 1 << torch.arange(16, device=signs.device)
    up, down = (((whole.view(-1, 16) == sign) * weights).sum(dim=1) for sign in (1, -1))
    words = up + (down << 16)
    return torch.where(words >= _MAP, words - 2 * _MAP, words).to(torch.int32)


def _encode(encoding: Threshold, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
    tau = encoding.tau_of(x, residual, when)
    count, bad = codes_sparse.SourceArrays(x, residual).count_over(tau)
    refuse(encoding.facts.name, bad, x, residual)
    wire, words, is_map = encoding.headed(count, tau, x, out)
    codes_sparse.pack_threshold(x, residual, tau, is_map, words)
    return wire


def _add_(encoding: Threshold, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    words, tau, is_map = encoding.opened(wire, out)
    if not codes_sparse.add_threshold(out, words, tau, is_map):
        raise ValueError(f"a wire of {encoding.facts.name} has entries that a tensor of {out.numel()} elements has not")


_KERNELS = Kernels(serves, _add_, from_zeros(_add_), serves, _encode)
