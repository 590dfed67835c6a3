"""Parameter averaging: workers train alone and average their models now and then."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, native, spelled
from polytempo.synchronization import every


def parameter_averaging(period: int = 10, optimizer_state: bool = True, route: Route = native) -> Strategy:
    """Average the models every `period` steps, and with them the optimizers' state.

    θ ← Σᵢ (1/N) θᵢ at steps H, 2H, … With `optimizer_state` the moments (momentum, Adam's m and v) are averaged
    too, as DL4J does. With H = 1 and plain SGD or momentum this equals synchronous SGD; with Adam it does not.

    Cost: the route's, once in H steps, on the parameters (and one more buffer for each moment).

    Source: D. Povey, X. Zhang and S. Khudanpur, "Parallel training of DNNs with natural gradient and parameter
    averaging", 2014; P. Moritz et al., "SparkNet", 2016.
    """
    return Strategy(
        spelled("parameter_averaging", period=period, optimizer_state=optimizer_state, route=route),
        parameters=every(period, mean(route)),
        in_step=period == 1,
        carries_optimizer=optimizer_state,
    )
