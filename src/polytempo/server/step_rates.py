"""Facts of the gradients in a sum: `StepRates`, their learning rates, and `UnusedParameters`, which have no gradient.

    push of worker 0   η₀ = 0.1   s₀ = 1   ─┐   learning rate   η̄ = Σ mᵢ sᵢ ηᵢ / Σ mᵢ
    push of worker 1   η₁ = 0.1   s₁ = 1/2 ─┤
    push of worker 2   η₂ = 0.08  s₂ = 1/3 ─┘   gradient        ḡ = Σ mᵢ sᵢ ηᵢ gᵢ / (D η̄)

ηᵢ is the learning rate that came with a push, sᵢ its factor by staleness, mᵢ its weight in the mean, D the update's
divisor, equal to Σ mᵢ for a mean. For SGD without momentum the step is the mean of the single steps, θ ← θ - (1/D) Σ mᵢ
sᵢ ηᵢ gᵢ. For the others ḡ has the size of a gradient, so moments keep their scale, and η̄ is the rate of the step and
of its weight decay.

Numbers only, and one for each parameter group. The sum that a shard keeps is of mᵢ rᵢ / R · gᵢ with rᵢ = sᵢ ηᵢ and R
the largest rᵢ so far. So where all rates are equal each gradient is multiplied by mᵢ and the sum divided by D, and
nothing else is rounded; where they are not, no multiple is larger than mᵢ.

    push of worker 0   no gradient of a, b  ─┐
    push of worker 1   no gradient of b     ─┴▶ the sum has none of b: an update leaves it alone, as plain torch does

A parameter has a gradient in a sum if any of its pushes has one. In a push without it its gradient counts as 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

Factor = float | tuple[float, ...]
"""One number for all parameter groups, or one for each."""


class Multiples(NamedTuple):
    """The factors of a gradient that is added to the sum, and of the sum before it; None: the sum stays as it is."""

    own: Factor
    before: Factor | None = None


ONCE = Multiples(1.0)
"""The factors of most gradients."""


class StepRates(msgspec.Struct, frozen=True, array_like=True):
    """The rates and weights of the gradients in a sum."""

    largest: tuple[float, ...] = ()
    """R: the largest rate in the sum, or, if that is empty, the rate of the last update."""
    weight: float = 0.0
    """Σ mᵢ."""
    scaled_weight: tuple[float, ...] = ()
    """Σ mᵢ rᵢ / R; () where that is Σ mᵢ in every group."""

    def with_one(self, weight: float, rates: tuple[float, ...]) -> tuple[StepRates, Multiples]:
        """One more gradient, with `weight` in the mean and these `rates`."""
        if not self.weight:
            return StepRates(rates, weight), ONCE if weight == 1 else Multiples(weight)
        if rates == self.largest:
            scaled = tuple(sum_so_far + weight for sum_so_far in self.scaled_weight) if self.scaled_weight else ()
            return StepRates(rates, self.weight + weight, scaled), Multiples(weight)
        largest = tuple(map(_larger, self.largest, rates))
        same, before = self.measured_in(largest)
        own = tuple(weight * _ratio(rate, most) for rate, most in zip(rates, largest, strict=True))
        scaled = tuple(sum_so_far + mine for sum_so_far, mine in zip(same.scaled_weight, own, strict=True))
        unchanged = largest == self.largest
        return StepRates(largest, self.weight + weight, scaled), Multiples(_one(own), None if unchanged else before)

    def measured_in(self, largest: tuple[float, ...]) -> tuple[StepRates, Factor]:
        """The same gradients with a new R = `largest`, at least as large as before, and the factor on their sum for
        that."""
        ratios = tuple(map(_ratio, self.largest, largest))
        before = self.scaled_weight or (self.weight,) * len(ratios)
        scaled = tuple(sum_so_far * ratio for sum_so_far, ratio in zip(before, ratios, strict=True))
        return StepRates(largest, self.weight, scaled), _one(ratios)

    def step(self, divisor: float) -> tuple[tuple[float, ...], Factor]:
        """The learning rates η̄ of an update by the sum over `divisor`, and the divisor that makes the sum ḡ."""
        if not self.scaled_weight or not self.weight:
            return self.largest, divisor
        shares = [sum_so_far / self.weight for sum_so_far in self.scaled_weight]
        rates = tuple(rate * share for rate, share in zip(self.largest, shares, strict=True))
        return rates, _one([divisor * (share or 1.0) for share in shares])  # a share of 0: then the rate is 0


def largest_of(several: Sequence[StepRates]) -> tuple[float, ...]:
    """The largest R of `several`: all their sums can be measured in it."""
    largest = several[0].largest
    for one in several[1:]:
        largest = tuple(map(_larger, largest, one.largest))
    return largest


def times(factor: Factor, other: Factor) -> Factor:
    """Their product, group by group."""
    if isinstance(factor, tuple):
        others = other if isinstance(other, tuple) else (other,) * len(factor)
        return tuple(a * b for a, b in zip(factor, others, strict=True))
    return tuple(factor * each for each in other) if isinstance(other, tuple) else factor * other


def of_group(factor: Factor, group: int) -> float:
    """The number for one parameter group."""
    return factor[group] if isinstance(factor, tuple) else factor


def _one(numbers: Sequence[float]) -> Factor:
    """One number where all are equal."""
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def _larger(one: float, other: float) -> float:
    return other if abs(other) > abs(one) else one


def _ratio(rate: float, largest: float) -> float:
    """rate / largest; where all are 0 each counts by its weight alone, for moments take in gradients even then."""
    return rate / largest if largest else 1.0


class UnusedParameters(msgspec.Struct, array_like=True):
    """The unused parameters of a shard's sums, by name."""

    summed: tuple[str, ...] | None = None
    """The parameters without a gradient in the sum; None: the sum has no push."""
    parts: dict[int, tuple[str, ...]] = {}
    """Batch -> the parameters without a gradient in the sum of its parts."""
    skipped: dict[str, int] = {}
    """Parameter -> the number of the optimizer's steps that have left it alone."""

    def add(self, unused: Collection[str], part_of: int | None = None) -> None:
        """A push without a gradient of `unused` is in the sum, or in the sum of the batch `part_of`."""
        if part_of is None:
            self.summed = common(self.summed, unused)
        else:
            self.parts[part_of] = common(self.parts.get(part_of), unused)

    def take(self, including: int | None = None) -> tuple[str, ...]:
        """The unused parameters of an update with the sum, and with the parts of the batch `including`."""
        found, self.summed = self.summed, None
        if including in self.parts:
            found = common(found, self.parts.pop(including))
        for name in found or ():
            self.skipped[name] = self.skipped.get(name, 0) + 1
        return found or ()


def common(known: Iterable[str] | None, unused: Collection[str]) -> tuple[str, ...]:
    """The parameters that neither sum has a gradient of. `known` None: there is only one sum."""
    return tuple(unused if known is None else (name for name in known if name in unused))


def joined(several: Sequence[tuple[UnusedParameters, int]], steps: int) -> UnusedParameters:
    """The unused parameters of a shard that takes over others' elements and goes on after step `steps`.

    `several`: each shard's, with its steps. A parameter that several shards had in pieces counts as in the first one.
    """
    found = UnusedParameters()
    for each, made in several:
        if each.summed is not None:
            found.add(each.summed)
        for batch, names in each.parts.items():
            found.add(names, batch)
        for name, skipped in each.skipped.items():
            found.skipped.setdefault(name, steps - (made - skipped))
    return found
