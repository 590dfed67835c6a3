"""Deep gradient compression: one element in a thousand, with the momentum that the others would have had.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression: reducing the communication bandwidth
for distributed training", 2018; and the authors' code, github.com/synxlin/deep-gradient-compression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import placed
from polytempo.compression.encoding.values import check_finite, check_kind, refuse
from polytempo.core import ALONE, CodecState, EncodeContext, Facts, Law, Residual
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real, check_whole
from polytempo.core.state import narrowed, wide
from polytempo.native.kernels import codes_sparse

WARMUP = (0.25, 0.063, 0.015, 0.004)
"""The kept ratios before the last one, a stage each: 75 %, 93.75 %, 98.4375 % and 99.6 % stay out, as in the paper."""

TOO_MANY, TOO_FEW = 1.3, 0.8
"""Bounds of a sampled threshold's count, in ratio · n."""


def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    clip: float | None = None,
    warmup_steps: int = 0,
    *,
    sample: float = 0.01,
    dense_below: int = 1024,
) -> Dgc:
    """Top-k with momentum correction, masking, local clipping and a warm-up. Keeps its own memory: no `feedback`.

        g ← x · min(1, clip / ‖x‖)          local clipping, before anything is added up
        u ← momentum · u + g                momentum correction: late values have had their momentum, too
        v ← v + u
        send v where |v| is large; u ← 0, v ← 0 there          momentum factor masking

    Values are large from the threshold of a strided sample on (`sample` of the tensor, and at least 2 / ratio
    elements). Where that finds more than 1.3 or fewer than 0.8 times k = ⌈ratio · n⌉, exactly the k largest are sent,
    and of them no zeros. Wire: see `compression.entries`; at ratio 0.001 and float32 8 bytes an entry, the most 1.3 ·
    k.

    momentum: the optimizer's, which then must not apply its own to these gradients (only to the weight decay, as
    in the authors' optimizer). 0 without momentum.
    clip: the largest norm of one tensor of this rank, as `through` encodes it (share · gradient). The paper scales the
    threshold T of the whole gradient by N^-1/2; with shares of 1/N that is clip = T · N^-3/2. As in the authors'
    code each tensor is clipped for itself.
    warmup_steps: over so many steps the ratio goes through 0.25, 0.063, 0.015, 0.004, as many steps each.
    dense_below: tensors of fewer elements send all of u, and keep u, as the authors do with biases; so does a ratio of
    1. Use `through(dgc(…), exact_below=0)`, or small tensors travel without their momentum.

    At ratio 1 and momentum 0, x is sent. Law: "conserving"; at momentum 0, Σ decoded + v = Σ x. State: v, and u where
    there is momentum, a tensor each of x's dtype; for 16-bit tensors of float32, 4 bytes an element, so that they take
    up small values (the error of rounding a sent value to x's dtype stays in v). Where ranks come or go their sums over
    all ranks stay; who is left alone gives v and forgets u, as masking does (`Accumulated.given`). Cost: with the
    kernels two passes over x, u and v; one of them writes u and v.

    Deviations: the authors' sample begins at a random place, ours at a function of the step and the tensor; they send
    the first k of up to 1.3 k that the threshold finds, we send all; where it finds too few they lower it in steps.
    They add u of dense tensors after the exchange, we before: the same sum but for rounding. Zeros are not sent.

    Raises ValueError for values out of range, and NotFinite, before anything has changed, for NaN and infinities.
    """
    check_real(ratio=ratio, sample=sample, momentum=momentum, clip=1 if clip is None else clip)
    check_whole(warmup_steps=warmup_steps, dense_below=dense_below)
    for name, value in (("ratio", ratio), ("sample", sample)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is a share of the elements, over 0 and at most 1, got {value}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip is the norm that a tensor may have, over 0, got {clip}")
    if warmup_steps < 0 or dense_below < 0:
        raise ValueError(f"warmup_steps and dense_below are numbers >= 0, got {warmup_steps} and {dense_below}")
    return Dgc(ratio, momentum, clip, warmup_steps, sample, dense_below)


class Accumulated(NamedTuple):
    """The state of a tensor. A rank that takes over from several ranks goes on with the sums of both."""

    u: Residual
    """The momentum of this rank's part; nothing without momentum. m / (1 - m) · u is still to come of it."""
    v: Residual
    """The sum of its u that was not sent."""

    def given(self) -> tuple[list[Tensor], Accumulated]:
        """The gift of the last rank, and the state after it: v, and not u, which is part of v already.

        Giving v is sending all of it, and the paper's masking stops the momentum of sent values: else late values
        would push on in an old direction. So u is 0 afterwards.
        """
        return ([] if self.v.residual is None else [self.v.residual]), Accumulated(Residual(), Residual())


@dataclass(frozen=True)
class Dgc:
    """See `dgc`."""

    ratio: float
    momentum: float
    clip: float | None
    warmup_steps: int
    sample: float
    dense_below: int

    @cached_property
    def facts(self) -> Facts:
        """Σ decoded + v = Σ u, but for the momentum that is stopped where something was sent; Σ x at momentum 0."""
        return Facts(
            codec_name(dgc, self, brief=("clip", "warmup_steps", "sample", "dense_below")),
            Law("conserving"),
            flops=7.0,
            sparse=True,
            fixed=False,
            memory="own",
            state_bytes=self._state_bytes,
            momentum=self.momentum,
        )

    def _state_bytes(self, like: Tensor) -> int:
        kept = bool(self.momentum) + (not self._is_dense(like.numel(), self.ratio))
        return kept * like.numel() * wide(like.dtype).itemsize

    def init(self, like: Tensor) -> Accumulated:
        """No momentum, and no residual."""
        return Accumulated(Residual(), Residual())

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """The most: 1.3 · ratio · n entries, at the largest ratio of all steps."""
        n = like.numel()
        ratio = max(self.ratio, WARMUP[0]) if self.warmup_steps else self.ratio
        most = n if self._is_dense(n, ratio) else min(_most(n, ratio), n)
        return entries.wire_bytes(n, most, like.element_size())

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def ratio_at(self, step: int) -> float:
        """The share that is kept at that step (from 1 on): the stages of the warm-up, then `ratio`."""
        if step > self.warmup_steps:
            return self.ratio
        return max(self.ratio, WARMUP[(step - 1) * len(WARMUP) // self.warmup_steps])

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """One step. The state that is given is spent: its tensors become the next state's, in place."""
        check_kind(x)
        x = x.detach()
        before = self.init(x) if state is None else state
        u, held = _memory(before.u, x), before.v
        scale, n, ratio = self._scale(x), x.numel(), self.ratio_at(when.step)
        if self._is_dense(n, ratio):
            return self._whole(x, u, held, scale, out)
        v = _memory(held, x)
        if codes_sparse.serves(x, u, v):
            indices, values = self._found(codes_sparse.SourceArrays(x, v, u, self.momentum, scale), ratio, when)
            wire = self._placed(entries.write(indices, values, n), out)  # which may not fit; so before anything changes
            codes_sparse.accumulate(x, u, v, self.momentum, scale)
            for memory in (u, v):
                codes_sparse.zero(memory, indices, indices.numel())
        else:
            momentum = u * self.momentum + x.to(u.dtype) * scale
            total = (v + momentum).reshape(-1)
            check_finite(self.facts.name, total)
            indices = self._picked(total, ratio, when)
            indices, values = _nonzero(indices, narrowed(total[indices], x))
            wire = self._placed(entries.write(indices, values, n), out)
            fresh = momentum.reshape(-1)
            fresh[indices] = 0
            total[indices] -= values  # 0, except for rounding to 16 bits
            u.copy_(fresh.view(u.shape))
            v.copy_(total.view(v.shape))
        return wire, self._kept(u, Residual(v))

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """The values at their places, 0 elsewhere."""
        out = torch.zeros_like(like, memory_format=torch.contiguous_format)
        entries.add_entries_(self.facts.name, wire, out)
        return out

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """Add the values at their places. Raises ValueError, and adds nothing, for an impossible wire."""
        entries.add_entries_(self.facts.name, wire, out)

    def _placed(self, wire: Tensor, out: Tensor | None) -> Tensor:
        return wire if out is None else placed(self.facts.name, wire, out)

    def _is_dense(self, n: int, ratio: float) -> bool:
        return n < self.dense_below or math.ceil(ratio * n) >= n

    def _scale(self, x: Tensor) -> float:
        """The factor of x for a norm of at most `clip`; the authors' 1e-6 in the divisor is left out."""
        if self.clip is None or not x.numel():
            return 1.0
        check_finite(self.facts.name, x)
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        return min(1.0, self.clip / norm) if norm else 1.0

    def _kept(self, u: Tensor, v: Residual) -> Accumulated:
        """The next state: without momentum u says nothing about the next step."""
        return Accumulated(Residual(u) if self.momentum else Residual(), v)

    def _whole(self, x: Tensor, u: Tensor, v: Residual, scale: float, out: Tensor | None) -> tuple[Tensor, Accumulated]:
        """Send all of u, and the residual of sparser steps. Momentum goes on, because no part of it was kept back."""
        momentum = u * self.momentum + x.to(u.dtype) * scale
        residual = v.residual
        total = momentum if residual is None else momentum + residual
        check_finite(self.facts.name, total)
        sent, n = narrowed(total, x), x.numel()
        wire = self._placed(entries.write(torch.arange(n, device=x.device), sent.reshape(-1), n), out)
        u.copy_(momentum)
        if residual is not None:
            torch.sub(total, sent, out=residual)  # 0, except for rounding to 16 bits
        elif sent.dtype is not total.dtype:
            v = Residual(total - sent)
        return wire, self._kept(u, v)

    def _found(self, source: codes_sparse.SourceArrays, ratio: float, when: EncodeContext) -> tuple[Tensor, Tensor]:
        """Indices (int32) and values to send, by kernels; nothing has changed yet."""
        x, n = source.x, source.x.numel()
        k = math.ceil(ratio * n)
        x_s, v_s, u_s = (self._sampled(t, ratio, when) for t in (x, source.residual, source.velocity))
        cut = _cut(v_s + (u_s * source.momentum + x_s * source.scale), k / n)
        room = min(_most(n, ratio), n)
        indices, values = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=x.dtype)
        count, bad = source.above(cut, indices, values)
        if bad < 0 and not TOO_FEW * k <= count <= room:
            raw = torch.empty(8 * k, dtype=torch.uint8)
            (count, bad), indices = source.top(k, raw), raw[: 4 * k].view(torch.int32)
            values = entries.taken(raw, 4 * k, k, x.dtype)
        if bad >= 0:
            assert source.residual is not None
            assert source.velocity is not None
            total = source.residual + (source.velocity * source.momentum + x * source.scale)
            refuse(self.facts.name, bad, total)
        return _nonzero(indices[:count], values[:count])

    def _picked(self, total: Tensor, ratio: float, when: EncodeContext) -> Tensor:
        """The same by torch: indices (int64), also of zeros where there are not enough others."""
        n = total.numel()
        k = math.ceil(ratio * n)
        cut = _cut(self._sampled(total, ratio, when), k / n)
        indices = ((total.abs() >= cut) & (total != 0)).nonzero().view(-1)
        if TOO_FEW * k <= indices.numel() <= min(_most(n, ratio), n):
            return indices
        return entries.largest(total, k)

    def _sampled(self, t: Tensor | None, ratio: float, when: EncodeContext) -> Tensor:
        """Every so many elements: a share of `sample`, and at least two that are expected to be sent."""
        assert t is not None, "the source of dgc has all three"
        return entries.sampled(t, max(math.ceil(self.sample * t.numel()), math.ceil(2 / ratio)), when)


def _memory(held: Residual, like: Tensor) -> Tensor:
    """The residual, to be written to; zeros where there is none."""
    if held.residual is None:
        return torch.zeros_like(like, dtype=wide(like.dtype), memory_format=torch.contiguous_format)
    return held.residual


def _nonzero(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Drop entries of value 0: some of the k largest, where fewer than k are not 0."""
    kept = values != 0
    return (indices, values) if bool(kept.all()) else (indices[kept], values[kept])


def _most(n: int, ratio: float) -> int:
    """The largest number of sent entries."""
    return math.floor(TOO_MANY * math.ceil(ratio * n))


def _cut(sample: Tensor, share: float) -> float:
    """The magnitude that this share of a sample reaches."""
    count = max(1, math.ceil(sample.numel() * share))
    return float(torch.topk(sample.abs(), min(count, sample.numel()), sorted=False).values.min())
