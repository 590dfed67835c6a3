"""The mean over ranks, weighted by how many samples each one saw.

Source: for gradients, synchronous SGD as in J. Chen et al., "Revisiting distributed synchronous
SGD", 2016; for parameters, M. Zinkevich et al., "Parallelized stochastic gradient descent", 2010.
"""

from __future__ import annotations

from polytempo.core import Bundle, Cost, Port, Route, Transform, averaging, native, stateless
from polytempo.core.cost import summed
from polytempo.core.route import check_route


def mean(route: Route = native) -> Transform:
    """Σᵢ shareᵢ · xᵢ over all ranks i, travelling by `route`.

    shareᵢ is rank i's samples over all ranks' samples (1/N where the bundle does not say). So the
    mean of mean-gradients over uneven batches is exactly the gradient of the joined batch, and no
    message carries the counts. Scaling before adding keeps 16-bit sums in range. With share 0 zeros travel,
    whatever xᵢ holds (0 · NaN would be NaN).

    Cost: one pass over the gradients, which packs and scales them, then the route's.
    """
    check_route(route)
    average = averaging(route)

    async def apply(port: Port, bundle: Bundle) -> Bundle:
        return await average(port, bundle, None)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((summed(parameters, route),))

    return stateless(apply, weighs=True, linear=True, cost=cost, beside=average)
