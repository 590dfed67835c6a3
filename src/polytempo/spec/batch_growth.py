"""Growth of a run's batches: after given epochs, or by a test of the gradients' noise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import inf
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


BatchGrowth = Mapping[int, float] | NormTest
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


def parse_growth(text: str) -> BatchGrowth:
    """Read `"5:4,10:2"` or `"norm_test(theta=0.5)"`. `ValueError` for other texts."""
    if "(" in text or text.strip().isidentifier():
        found = resolve(parse_call(text), {"norm_test": norm_test}, {}, what="rule by which batches grow")
        assert isinstance(found, NormTest)
        return found
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        return {int(epoch): float(times) for epoch, _, times in pairs}
    except ValueError:
        raise ValueError(
            "must be written EPOCH:TIMES, with commas between, as in 5:4,10:2, or norm_test(theta=0.5)"
        ) from None


def growth_of(given: object) -> BatchGrowth:
    """The value of an option `batch_growth`, also from text. ValueError where nothing could grow."""
    growth = parse_growth(given) if isinstance(given, str) else given
    return norm_test(*growth) if isinstance(growth, NormTest) else converted(growth, _FACTORS)
