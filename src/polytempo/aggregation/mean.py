"""Means: over ranks, weighted by the samples of each one, and over the steps of one rank.

Source: for gradients, synchronous SGD as in J. Chen et al., "Revisiting distributed synchronous
SGD", 2016; for parameters, M. Zinkevich et al., "Parallelized stochastic gradient descent", 2010.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Port, Promise, Route, Transform, averaging, native, stateless
from polytempo.core.cost import num_bytes, summed
from polytempo.core.route import check_route


def mean(route: Route = native) -> Transform:
    """Σᵢ shareᵢ · xᵢ over all ranks i, travelling by `route`.

    shareᵢ is rank i's samples over all ranks' samples (1/N where the bundle does not say). So the
    mean of mean-gradients over uneven batches is exactly the gradient of the joined batch, and no
    message carries the counts. Scaling before adding keeps 16-bit sums in range. With share 0 zeros travel
    in place of xᵢ (0 · NaN would be NaN).

    Cost: one pass over the gradients, which packs and scales them, then the route's.
    """
    check_route(route)
    average = averaging(route)

    async def apply(port: Port, bundle: Bundle) -> Bundle:
        return await average(port, bundle, None)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((summed(parameters, route),))

    return stateless(apply, promises=Promise.SEPARABLE | Promise.WEIGHS | Promise.LINEAR, cost=cost, beside=average)


class MovingAverageState(NamedTuple):
    """m, the average so far."""

    average: Bundle


def senders_mean(buffers: Sequence[Tensor]) -> Tensor:
    """Σᵢ xᵢ / (number of xᵢ that are not 0), for each coordinate: a merge of sparse updates.

    A coordinate of one sender alone moves N times as far as by the mean over N ranks.
    """
    total, count = torch.zeros_like(buffers[0]), torch.zeros_like(buffers[0])
    for buffer in buffers:
        total += buffer
        count += buffer != 0
    return total / count.clamp(min=1)


def moving_average(momentum: float, ahead: float | None = None) -> Transform:
    """m ← β m + (1 - β) g; the answer is m. β = `momentum`. With `ahead`, β₁, it is β₁ m + (1 - β₁) g of the m before.

    Cost: memory for m.
    """
    for given in (momentum, ahead or 0.0):
        if not 0 <= given < 1:
            raise ValueError(f"momentum is at least 0 and below 1, got {given}")

    def init(parameters: Bundle) -> MovingAverageState:
        return MovingAverageState(parameters.map(lambda flat: flat.new_zeros(flat.shape)))

    async def apply(port: Port, bundle: Bundle, state: MovingAverageState) -> tuple[Bundle | None, MovingAverageState]:
        average = bundle.with_flat(state.average.flat.lerp(bundle.flat, 1 - momentum))
        answer = average.copy() if ahead is None else bundle.with_flat(state.average.flat.lerp(bundle.flat, 1 - ahead))
        return answer, MovingAverageState(average)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost(memory_bytes=num_bytes(parameters))

    return Transform(init, apply, cost=cost)
