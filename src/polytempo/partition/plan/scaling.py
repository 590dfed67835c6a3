"""How the speed-up of p workers falls behind p, from one speed-up that was measured.

    time of a step of B samples on p workers   t(p) = t₁·B/p + s(p)
    speed-up                                   1/S = 1/p + c · s(p)/B

s(p) is what a reduction over p workers costs by the cost model: ∝ log₂p for a tree, ∝ p for a parameter server. The
constant c, which holds the network's speed and the sample's time, follows from one measured speed-up.

Source: the measurements of F. Iandola et al., "FireCaffe", 2016, section 6, and the argument of its section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polytempo.core import Price

PriceOf = Callable[[int, float, float, float], Price]
"""What a reduction costs: `price(num_ranks, num_bytes, latency_s, bytes_per_s)`."""


@dataclass(frozen=True)
class ScalingLaw:
    """A reduction's price, and the constant c."""

    price: PriceOf
    constant: float

    @staticmethod
    def calibrated(price: PriceOf, speed_up: float, workers: int, batch_size: int) -> ScalingLaw:
        """The law that gives this speed-up for so many workers and samples of a step.

        Raises ValueError for a speed-up that is none, or more than the workers'.
        """
        if not 0 < speed_up <= workers or workers < 2:
            raise ValueError(f"{workers} workers cannot have been {speed_up:g} times as fast as one; measure again")
        return ScalingLaw(price, (1 / speed_up - 1 / workers) * batch_size / _growth(price, workers))

    def speed_up(self, workers: int, batch_size: int) -> float:
        """Over one worker."""
        return 1 / (1 / workers + self.constant * _growth(self.price, workers) / batch_size)


def _growth(price: PriceOf, workers: int) -> float:
    return price(workers, 1.0, 0.0, 1.0).seconds
