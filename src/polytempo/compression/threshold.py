"""Strom's threshold: every element beyond ±τ sends ±τ, and keeps the rest.

Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015, sections 3 and 4; the
bitmap for dense tensors is that of Deeplearning4j's gradient sharing; a τ that sends a given share is that of N. Dryden
et al., "Communication quantization for data-parallel training of deep neural networks", 2016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression import entries
from polytempo.compression.values import check_kind
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_real
from polytempo.native import codes_sparse

_HEADER = "<If"
_HEADER_BYTES = 8
_MAP = 2**31
_SAMPLE, _OVER = 1024, 64
"""τ is found among every 1024th element, or more: as many as have 64 that are expected to be over it."""
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@dataclass(frozen=True)
class Threshold:
    """See `threshold`."""

    tau: float
    density: float | None
    summable: bool = False
    sparse: bool = True
    fixed: bool = False
    passes_nonfinite: bool = False
    flops: float = 3.0

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(threshold, self, brief=("density",))

    @property
    def law(self) -> Law:
        """A single tensor may lose everything (|x| <= τ); with feedback nothing is lost."""
        return Law("conserving")

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """At most 8 + 4⌈n/16⌉: a bitmap."""
        return _HEADER_BYTES + 4 * _words(like.numel())

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on: a wire has its own τ."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The wire of x. Two passes over x: one counts, one writes."""
        return self._encoded(x.detach(), None, when, out), state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """The wire of v = x + residual; residual ← v ∓ τ where sent. Reads both twice, writes the residual once."""
        return self._encoded(x.detach(), residual, when, out), state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """τ, -τ and 0."""
        out = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self.add_(wire, out, when)
        return out

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out ± τ where the wire says so. Raises ValueError, and adds nothing, for a wire that no such tensor has."""
        entries.check_wire(self.name, wire, out)
        head, tau = entries.header(wire, _HEADER, self.name)
        is_map, count = head >= _MAP, int(head) % _MAP
        num_words = _words(out.numel()) if is_map else count
        if count > out.numel() or wire.numel() < _HEADER_BYTES + 4 * num_words or not 0 < tau < math.inf:
            raise ValueError(
                f"a wire of {self.name} with {wire.numel()} bytes says that it has {count} entries of {tau}, for "
                f"{out.numel()} elements"
            )
        words = wire[_HEADER_BYTES : _HEADER_BYTES + 4 * num_words]
        if codes_sparse.serves(out):
            if not codes_sparse.add_threshold(out, words, tau, is_map):
                raise ValueError(f"a wire of {self.name} has entries that a tensor of {out.numel()} elements has not")
            return
        codes = entries.taken(words, 0, num_words, torch.int32).long()
        indices, signs = self._unmapped(codes, out.numel()) if is_map else _unlisted(codes)
        entries.add_at_(out, indices, signs.to(out.dtype) * tau, self.name)

    def _encoded(self, x: Tensor, residual: Tensor | None, when: EncodeContext, out: Tensor | None) -> Tensor:
        check_kind(x)
        n = x.numel()
        entries.check_count(self.name, n)
        tau = _representable(self.tau if self.density is None else self._adapted(x, residual, when), x.dtype)
        if codes_sparse.serves(x, x if residual is None else residual):
            count, bad = codes_sparse.SourceArrays(x, residual).count_over(tau)
            if bad >= 0:
                entries.refuse(self.name, bad, x if residual is None else x + residual)
            wire, is_map = self._headed(count, n, tau, out, x.device)
            codes_sparse.pack_threshold(x, residual, tau, is_map, wire[_HEADER_BYTES:])
        else:
            v = (x if residual is None else x + residual).reshape(-1)
            entries.check_finite(self.name, v)
            signs = (v > tau).to(torch.int8) - (v < -tau).to(torch.int8)
            count = int(signs.count_nonzero())
            wire, is_map = self._headed(count, n, tau, out, x.device)
            entries.put(wire, _HEADER_BYTES, _mapped(signs) if is_map else _listed(signs))
            if residual is not None:
                residual.copy_((v - signs.to(v.dtype) * tau).view(residual.shape))
        return wire

    def _headed(self, count: int, n: int, tau: float, out: Tensor | None, device: torch.device) -> tuple[Tensor, bool]:
        """A wire with nothing but its header, and whether a map follows: where a list would be longer."""
        is_map = count > _words(n)
        wire = entries.room(out, _HEADER_BYTES + 4 * (_words(n) if is_map else count), device)
        entries.put_header(wire, _HEADER, count + _MAP * is_map, tau)
        return wire, is_map

    def _adapted(self, x: Tensor, residual: Tensor | None, when: EncodeContext) -> float:
        """The τ just below what the share `density` of the sample reaches."""
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
            raise ValueError(f"a wire of {self.name} has entries that a tensor of {n} elements has not")
        indices = (up | down).nonzero().view(-1)
        return indices, (up - down)[indices]


def _words(n: int) -> int:
    """Of a bitmap."""
    return -(-n // 16)


def _representable(tau: float, dtype: torch.dtype) -> float:
    """τ as a float32 that the tensor can hold, too: what is sent is what is kept back, to the bit."""
    like = torch.float32 if dtype is torch.float64 else dtype
    limits = torch.finfo(like)
    return float(torch.tensor(min(max(tau, limits.tiny), limits.max), dtype=like))


def _below(largest: Tensor) -> float:
    """The next smaller number that a wire can have: what is as large as `largest` (1,), which is over 0, is over it."""
    like = torch.float32 if largest.dtype is torch.float64 else largest.dtype
    bits = largest.to(like).view(_INTEGERS[like]) - 1
    return float(bits.view(like))


def _listed(signs: Tensor) -> Tensor:
    """Indices, the highest bit set where the sign is negative."""
    indices = signs.nonzero().view(-1)
    return torch.where(signs[indices] < 0, indices - _MAP, indices).to(torch.int32)


def _unlisted(codes: Tensor) -> tuple[Tensor, Tensor]:
    return codes & (_MAP - 1), torch.where(codes < 0, -1, 1)


def _mapped(signs: Tensor) -> Tensor:
    """16 elements become a word: the lower half has bits where they go up, the upper where they go down."""
    whole = torch.zeros(16 * _words(signs.numel()), dtype=torch.int64, device=signs.device)
    whole[: signs.numel()] = signs
    weights = 1 << torch.arange(16, device=signs.device)
    up, down = (((whole.view(-1, 16) == sign) * weights).sum(dim=1) for sign in (1, -1))
    words = up + (down << 16)
    return torch.where(words >= _MAP, words - 2 * _MAP, words).to(torch.int32)


def threshold(tau: float = 1e-3, density: float | None = None) -> Threshold:
    """Every |vᵢ| > τ sends ±τ, not its value; with `feedback`, r ← v ∓ τ once, so what is larger goes several times.

        wire   | count, and 1 bit for the form (4 bytes) | τ (float32) |
        list   | 31 bits of index, 1 of sign             | …                            4 · count bytes
        map    | 16 bits: above τ, 16 bits: below -τ     | … a word for 16 elements     4 · ⌈n/16⌉ bytes

    The shorter form is taken, so the most is 8 + 4⌈n/16⌉ bytes, a 16th of float32 (Strom's has the list only; the map
    is that of Deeplearning4j, with other bits). Law: "conserving". Use it as `feedback(threshold(…))`: alone it loses.

    tau: in units of what is encoded. In `through` that is share · gradient, this rank's part of the mean, so for N
    equal ranks τ = τ_gradient / N. Strom encodes weight updates, lr · gradient, and adds up those of all workers: for
    the same entries his τ is lr · N times ours. Under a schedule his sends fewer as lr falls; ours does not notice.
    Too small a τ (|v| stays far above) makes the residual grow: nothing is lost, but it is late.

    density: the share of elements that shall be sent; then τ is the largest number that this share of a sample of v is
    over (every 1024th element, and at least 64 / density), and `tau` only where the whole sample is 0. Equal elements
    are sent together, and there may be many. A τ that follows the number sent before would not do: residuals pile up
    just below τ, so that a step with a slightly smaller one sends nearly all. Each rank adapts for itself, and each
    wire has its τ, so nothing is lost. Deviation: Dryden et al. have a τ and a value for either sign.

    float64 is compared and sent with τ rounded to float32; 16-bit tensors with τ rounded to their own type. Cost with
    a residual: x and r are read twice and r written once; with `density` the sample is read besides.
    Raises ValueError for τ <= 0, a density not in (0, 1], or a tensor of 2^31 elements or more, and NotFinite for NaN
    and infinities; the last two before anything has changed.
    """
    check_real(tau=tau, density=1 if density is None else density)
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, got {tau}")
    if density is not None and not 0 < density <= 1:
        raise ValueError(f"density is a share of the elements, over 0 and at most 1, got {density}")
    return Threshold(tau, density)
