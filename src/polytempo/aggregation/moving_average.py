"""A moving average of each rank's own gradients."""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import Bundle, Cost, Port, Transform
from polytempo.core.cost import num_bytes


class MovingAverageState(NamedTuple):
    """m, the average so far."""

    average: Bundle


def moving_average(momentum: float) -> Transform:
    """m ← β m + (1 - β) g; what goes on is m. β = `momentum`. Cost: memory for m."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is at least 0 and below 1, got {momentum}")

    def init(parameters: Bundle) -> MovingAverageState:
        return MovingAverageState(parameters.map(lambda flat: flat.new_zeros(flat.shape)))

    async def apply(port: Port, bundle: Bundle, state: MovingAverageState) -> tuple[Bundle | None, MovingAverageState]:
        average = bundle.with_flat(state.average.flat.lerp(bundle.flat, 1 - momentum))
        return average.copy(), MovingAverageState(average)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost(memory_bytes=num_bytes(parameters))

    return Transform(init, apply, cost=cost)
