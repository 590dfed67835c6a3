"""`Weights`: a shard's tensors. A lent buffer stays as it is; an update writes to a buffer without a holder.

buffer 0   lent to worker 1 ─────────────▶ worker 1 asks again: free
buffer 1   the weights ── update ──▶ lent to worker 0 …
buffer 2              └─ written by it ─▶ the weights
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core.rule import Add
from polytempo.server.encoding import ShownEncoding
from polytempo.server.layout import Empty
from polytempo.server.step_rates import ONCE, Factor, Multiples, StepRates, UnusedParameters, times
from polytempo.server.tensors.optimizer import Moments, Optimizer, StepNumber, Term, first_unfinite, init


class BufferPool:
    """Tensors of one length by number, each with a count of its holders."""

    def __init__(self, numel: int, dtype: torch.dtype, empty: Empty) -> None:
        self._numel, self._dtype, self._empty = numel, dtype, empty
        self.tensors: list[Tensor] = []
        self.holders: list[int] = []
        self._free: list[int] = []

    def take(self) -> int:
        """A buffer without a holder, held once from now on; new memory only where there is none."""
        if self._free:
            number = self._free.pop()
            self.holders[number] = 1
            return number
        self.tensors.append(self._empty(self._numel, self._dtype))
        self.holders.append(1)
        return len(self.tensors) - 1

    def hold(self, number: int) -> None:
        """Buffer `number` has one holder more."""
        self.holders[number] += 1

    def release(self, number: int) -> None:
        """Buffer `number` has one holder less; without any it is free."""
        self.holders[number] -= 1
        if not self.holders[number]:
            self._free.append(number)

    def adopt(self, tensors: Iterable[Tensor], spare: Iterable[Tensor]) -> None:
        """Begin with `tensors`, which have no holders until `hold` is called, and with free memory."""
        self.tensors = list(tensors)
        self.holders = [0] * len(self.tensors)
        for tensor in spare:
            self._free.append(len(self.tensors))
            self.tensors.append(tensor)
            self.holders.append(0)


class _SpeculativeUpdate(NamedTuple):
    """An update by one gradient, made while that was examined. It holds `out`."""

    gradient: Tensor
    scale: float
    rates: tuple[float, ...]
    version: int
    out: int


class Weights:
    """The present weights, older lent ones, the optimizer's moments, and the sum of gradients so far.

    `keeps_reads`: the weights that each worker read last are kept until it reads newer ones. `remembers`: the second
    moment, which the optimizer must have none of, is a modifier's. `shown`: encodes the
    weights for workers that pull; then no buffer is lent to them.
    """

    def __init__(
        self,
        values: Tensor,
        optimizer: Optimizer,
        empty: Empty,
        *,
        keeps_reads: bool,
        remembers: bool = False,
        shown: ShownEncoding | None = None,
    ) -> None:
        self.numel, self.dtype = values.numel(), values.dtype
        self.version = 0
        """The number of updates of the weights."""
        self.steps = 0
        """The number of the optimizer's steps."""
        self.buffers = BufferPool(self.numel, self.dtype, empty)
        self.current = self.buffers.take()
        self.buffers.tensors[self.current].copy_(values)
        self.moments = init(optimizer.rule, self.numel, self.dtype, empty)
        if remembers:
            assert self.moments.second is None, "the job's optimizer was looked at before"
            self.moments = self.moments._replace(second=empty(self.numel, self.dtype).zero_())
        self.total: Tensor | None = None
        """Memory for the sum; it has a sum where `summed`."""
        self.summed = False
        self.partial_sums: dict[int, Tensor] = {}
        """Batch -> the sum of the parts of its gradient that are there, until an update includes it."""
        self._idle: list[Tensor] = []  # free memory for such sums
        self.leases: dict[int, list[tuple[int, int]]] = {}
        """Worker -> (sequence of the answered request, buffer that the answer lends; -1: it lends none)."""
        self.reads: dict[int, tuple[int, int]] = {}
        """Worker -> (version, buffer) of the weights that it read last."""
        self.rates = StepRates()  # of the gradients in the sum
        self.unused = UnusedParameters()
        self.optimizer = optimizer
        self._empty, self._keeps_reads, self._shown = empty, keeps_reads, shown
        self._terms: list[Term] = []
        self._speculates = optimizer.descends
        self._total_factor: Factor = 1.0
        """The pending factor of `total`, since a larger rate has come."""
        self._scale: float | None = None
        """The factor of the last update, if it was by one gradient alone."""
        self._rate = 1.0
        """The factor on the learning rates of the last gradient."""
        self._speculative: _SpeculativeUpdate | None = None

    @property
    def present(self) -> Tensor:
        """The present weights, to be read only."""
        return self.buffers.tensors[self.current]

    # ------------------------------------------------------------------ lending

    def lend_present(self, worker: int, sequence: int, basis: int = -1) -> Tensor:
        """The present weights for `worker`, or a message of them, with the answer to its request `sequence`.

        `basis`: the version of the message that the worker holds, if it says so.
        """
        message = None
        if self._shown is not None:
            self.leases.setdefault(worker, []).append((sequence, -1))
            read, number = self.reads.get(worker, (-1, -1))
            held = (read, self.buffers.tensors[number]) if number >= 0 and read == basis else None
            message = self._shown.message(self.present, self.version, held)
        if self._keeps_reads:
            self.buffers.hold(self.current)
            if worker in self.reads:
                self.buffers.release(self.reads[worker][1])
            self.reads[worker] = self.version, self.current
        if message is not None:
            return message
        self.buffers.hold(self.current)
        return self.lend(worker, sequence, self.current)

    def lend(self, worker: int, sequence: int, number: int) -> Tensor:
        """Buffer `number`, which is held for it, with the answer to `worker`'s request `sequence`."""
        self.leases.setdefault(worker, []).append((sequence, number))
        return self.buffers.tensors[number]

    def settle(self, worker: int) -> list[int]:
        """`worker` asks again, so it has read the lent tensors. Returns the sequences of those answers."""
        leases = self.leases.pop(worker)
        for _, number in leases:
            if number >= 0:
                self.buffers.release(number)
        return [sequence for sequence, _ in leases]

    def leave(self, worker: int) -> None:
        """`worker` reads no more."""
        if worker in self.leases:
            self.settle(worker)
        self.forget(worker)

    def forget(self, worker: int) -> None:
        """`worker` has read other weights since."""
        if worker in self.reads:
            self.buffers.release(self.reads.pop(worker)[1])

    def read_by(self, worker: int, version: int) -> int:
        """The buffer with the weights of `version` that `worker` read, held once more; -1 if they are gone."""
        found, number = self.reads.get(worker, (-1, -1))
        if found != version:
            number = self.current if version == self.version else -1
        if number >= 0:
            self.buffers.hold(number)
        return number

    # ------------------------------------------------------------------ changing

    def examine(self, gradient: Tensor, lrs: tuple[float, ...]) -> int:
        """The index of the gradient's first element that is NaN or infinite; -1 if there is none.

        Where the last update was by one gradient alone, the next one probably is, too: it is made on the way, into a
        free buffer, and `update` accepts it. Reading a large gradient costs as much as updating from it. No bit depends
        on it; after one wrong guess, as where staleness changes the rate, no more are made.
        """
        self._cancel()
        if self._scale is None or not self._speculates or not gradient.is_contiguous():
            return first_unfinite(gradient, self.optimizer.native)
        out, rates = self.buffers.take(), self.optimizer.rates(lrs, self._rate)
        bad = self.optimizer.descend_(self.present, self.buffers.tensors[out], gradient, self._scale, rates)
        self._speculative = _SpeculativeUpdate(gradient, self._scale, rates, self.version, out)
        if bad >= 0:
            self._cancel()
        return bad

    def _cancel(self) -> None:
        if self._speculative is not None:
            self.buffers.release(self._speculative.out)
            self._speculative = None

    def weigh(self, action: Add, lrs: tuple[float, ...]) -> Multiples:
        """The factors for adding the next gradient, with its `lrs`. The sum before it is multiplied here.

        A part of a batch stays as it is: the gradient that completes the batch has the rates of all of it.
        """
        if action.part_of is not None:
            return ONCE
        self._rate = action.rate
        self.rates, multiples = self.rates.with_one(action.weight, self.optimizer.rates(lrs, action.rate))
        if multiples.before is not None:
            self._terms = [Term(gradient, times(factor, multiples.before)) for gradient, factor in self._terms]
            self._total_factor = times(self._total_factor, multiples.before)
        return multiples

    def add(
        self, gradient: Tensor, multiples: Multiples, part_of: int | None = None, unused: Collection[str] = ()
    ) -> None:
        """Add to the sum. This happens at the next update or `keep_sum`: until then the gradient must stay.

        `part_of`: add to the sum of that batch's parts instead, immediately. `unused`: parameters without a gradient.
        """
        term = Term(gradient, multiples.own)
        if self.optimizer.moves_by_zeros:
            self.unused.add(self.optimizer.silent(gradient, unused) if unused else (), part_of)
        if part_of is None:
            self._terms.append(term)
            return
        fresh = part_of not in self.partial_sums
        if fresh:
            self.partial_sums[part_of] = self._idle.pop() if self._idle else self._empty(self.numel, self.dtype)
        self.optimizer.add_(self.partial_sums[part_of], term, fresh=fresh)

    def keep_sum(self) -> None:
        """Copy the gradients that were added and not used yet into memory of the shard: gradients are only lent."""
        self._cancel()
        if not self._terms:
            return
        if self.total is None:
            self.total = self._empty(self.numel, self.dtype)
        if self.summed and self._total_factor != 1:
            self.optimizer.add_(self.total, Term(self.total, self._total_factor), fresh=True)
        for term in self._terms:
            self.optimizer.add_(self.total, term, fresh=not self.summed)
            self.summed = True
        self._terms, self._total_factor = [], 1.0

    def update(self, divisor: float, including: int | None = None) -> tuple[tuple[float, ...], Factor]:
        """A step of the optimizer with the sum, parts of the batch `including` in it, over `divisor`; then it is 0.

        Returns the step's learning rates, and the divisor that makes the sum a gradient (`StepRates.step`).
        """
        parts = None if including is None else self.partial_sums.pop(including, None)
        terms = self._terms if parts is None else [*self._terms, Term(parts, 1.0)]
        if self.summed:
            assert self.total is not None, "something is in it"
            terms = [Term(self.total, self._total_factor), *terms]
        self.steps += 1
        rates, divisors = self.rates.step(divisor)
        left = self.unused.take(including)
        out = self._accept_speculative(terms, divisors, rates, exact=not left)
        if out < 0:
            out = self._writable()
            step = StepNumber(self.steps, left, self.unused.skipped)
            self.optimizer.step_(self.present, self.buffers.tensors[out], terms, divisors, self.moments, step, rates)
        self._terms, self.summed, self._total_factor = [], False, 1.0
        self.rates = StepRates(rates)
        if parts is not None:
            self._idle.append(parts)
        self._replace_present(out)
        return rates, divisors

    def _accept_speculative(self, terms: list[Term], divisor: Factor, rates: tuple[float, ...], *, exact: bool) -> int:
        """The buffer with the speculative update, if it is this one; else -1. `exact`: no parameter is left alone."""
        seen, self._speculative = self._speculative, None
        self._scale = None
        if len(terms) == 1 and not self.summed:
            factor = terms[0].factor
            assert not isinstance(factor, tuple), "alone it has the largest rate in every group"
            assert not isinstance(divisor, tuple), "alone it moves as much as it weighs"
            self._scale = factor / divisor
        if seen is None:
            return -1
        ours = (self._scale, rates, self.version) == (seen.scale, seen.rates, seen.version)
        if ours and exact and terms[0].gradient is seen.gradient:
            return seen.out
        self.buffers.release(seen.out)
        self._speculates = False
        return -1

    def mix(self, theirs: Tensor, alpha: float) -> int:
        """θ ← θ + d, d = α (theirs - θ): the number of the buffer that has d, held."""
        out, number = self._writable(), self.buffers.take()
        difference = self.buffers.tensors[number]
        if not difference.is_meta:  # there are values
            difference.copy_(theirs).sub_(self.present).mul_(alpha)
            self.buffers.tensors[out].copy_(self.present).add_(difference)
        self._replace_present(out)
        return number

    def blend(self, others: Tensor, share: float) -> None:
        """θ ← (1 - share) θ + share · others."""
        out = self._writable()
        if not others.is_meta:  # there are values
            torch.lerp(self.present, others, share, out=self.buffers.tensors[out])
        self._replace_present(out)

    def _writable(self) -> int:
        """The present weights' own buffer if only the shard holds it, else one without a holder."""
        return self.current if self.buffers.holders[self.current] == 1 else self.buffers.take()

    def _replace_present(self, out: int) -> None:
        if out != self.current:
            self.buffers.release(self.current)
            self.current = out
        self.version += 1

    # ------------------------------------------------------------------ restoring

    def spare(self) -> list[Tensor]:
        """All memory taken from `empty`."""
        sums = (self.total, *self.partial_sums.values(), *self._idle)
        return [*self.buffers.tensors, *(t for t in (*self.moments, *sums) if t is not None)]

    def restore(
        self,
        held: list[Tensor],
        moments: Moments,
        total: Tensor | None,
        partial_sums: dict[int, Tensor],
        spare: list[Tensor],
    ) -> None:
        """Begin with these tensors; `held[0]` has the present weights, `spare` is free memory. Set the leases after."""
        self.buffers = BufferPool(self.numel, self.dtype, self._empty)
        self.buffers.adopt(held, spare)
        self.current = 0
        self.buffers.hold(self.current)
        self.moments, self.total, self.summed = moments, total, total is not None
        self._terms, self._speculative, self._total_factor = [], None, 1.0
        self.partial_sums, self._idle = partial_sums, []
        if self._shown is not None:
            self._shown.forget()
