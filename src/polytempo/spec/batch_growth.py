"""Growth of a run's batches: after given epochs, at a geometric rate, or by a test of the gradients' noise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import ceil, inf
from typing import Annotated, NamedTuple

from msgspec import Meta

from polytempo.spec.table.option import Count, converted
from polytempo.spec.text.call import parse_call
from polytempo.spec.text.resolution import resolve


class NormTest(NamedTuple):
    """A batch grows where the noise of its gradient outweighs θ of the gradient's length; see `norm_test`."""

    theta: float
    every: int

    def __str__(self) -> str:
        return f"norm_test(theta={self.theta!r}, every={self.every})"


class Geometric(NamedTuple):
    """A batch grows by the same factor every few steps; see `geometric`."""

    ratio: float
    every: int

    def __str__(self) -> str:
        return f"geometric(ratio={self.ratio!r}, every={self.every})"

    def after(self, batch: int) -> int:
        """⌈γ b⌉, the batch that follows `batch`; products are rounded to nine decimals, so 1.1 × 10 is 11."""
        return ceil(round(self.ratio * batch, 9))


BatchGrowth = Mapping[int, float] | NormTest | Geometric
"""`{5: 4}`: after epoch 5 the batch is multiplied by 4."""
_FACTORS = dict[Count, Annotated[float, Meta(ge=1, le=sys.float_info.max)]]


def norm_test(theta: float = 0.5, every: int = 8) -> NormTest:
    """An option `batch_growth`: the batch grows while a run goes on, as soon as its gradients are too noisy.

        tr Σ / B ≤ θ² |G|²        where it fails: B ← tr Σ / (θ² |G|²)

    `theta`: θ; a smaller one grows earlier. `every`: steps between two looks at the gradients. All workers exchange
    8 KiB in a step that is looked at, and wait for it, so that they grow in the same step of every run.

    Deviations: tr Σ and |G|² are the averages over some twenty looks, without bias, where the paper takes one batch's.
    The batch grows in whole multiples of the first one, to twice its size at most at a time, not before ten looks, and
    to the whole training set at most.

    Errors: ValueError unless θ is positive, and there is at least one step between two looks.
    Source: R. H. Byrd, G. M. Chin, J. Nocedal and Y. Wu, "Sample size selection in optimization methods for machine
    learning", 2012, section 3.
    """
    if not 0 < theta < inf or every < 1:
        raise ValueError(f"theta is a positive number and every at least 1, got {theta} and {every}")
    return NormTest(float(theta), every)


def geometric(ratio: float = 1.1, every: int = 1) -> Geometric:
    """An option `batch_growth`: the batch grows at a geometric rate, to the whole training set (dynamic sampling).

        b₀ = the first batch        bₖ₊₁ = min(⌈γ bₖ⌉, N)        N samples

    `ratio`: γ. `every`: steps between bₖ and bₖ₊₁.

    The mean gradient of b samples, drawn without repetition, has the error e, E ‖e‖² = (N - b) / (N b) S², S² the
    variance of a sample's gradient. Where f is μ-strongly convex with an L-Lipschitz gradient, plain SGD with the rate
    1/L has

        f(xₖ₊₁) - f* ≤ (1 - μ/L) (f(xₖ) - f*) + ‖eₖ‖² / 2L

    With a constant batch the last term stays, and f stalls. With `every` = 1 and γ > 1 it falls by γ a step: f - f*
    falls as fast as the larger of (1 - μ/L)ᵏ and γ⁻ᵏ, times k where they are equal.

    Deviations: each sample still counts once an epoch. The rest of an epoch is divided into equal batches of at least
    bₖ samples; the last of them may have bₖ₋₁.

    Errors: ValueError unless γ is above 1 and finite, and there is at least one step between two batches.
    Source: M. P. Friedlander and M. Schmidt, "Hybrid deterministic-stochastic methods for data fitting", SIAM Journal
    on Scientific Computing 34(3), 2012. `docs/tuning-a-batch.md` derives the inequality.
    """
    if not 1 < ratio < inf or every < 1:
        raise ValueError(f"ratio is a finite number above 1 and every at least 1, got {ratio} and {every}")
    return Geometric(float(ratio), every)


_RULES = {"norm_test": norm_test, "geometric": geometric}


def parse_growth(text: str) -> BatchGrowth:
    """Read `"5:4,10:2"`, `"norm_test(theta=0.5)"` or `"geometric(ratio=1.1)"`. `ValueError` for other texts."""
    if "(" in text or text.strip().isidentifier():
        found = resolve(parse_call(text), _RULES, {}, what="rule by which batches grow")
        assert isinstance(found, NormTest | Geometric)
        return found
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        return {int(epoch): float(times) for epoch, _, times in pairs}
    except ValueError:
        raise ValueError(
            "must be written EPOCH:TIMES, with commas between, as in 5:4,10:2, or norm_test(theta=0.5), or "
            "geometric(ratio=1.1)"
        ) from None


def growth_of(given: object) -> BatchGrowth:
    """The value of an option `batch_growth`, also from text. ValueError where nothing could grow."""
    growth = parse_growth(given) if isinstance(given, str) else given
    if isinstance(growth, Geometric):
        return geometric(*growth)
    return norm_test(*growth) if isinstance(growth, NormTest) else converted(growth, _FACTORS)
