"""Parameter averaging: workers train alone and average their models now and then."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, call_name, native
from polytempo.synchronization import PeriodRule, every


def parameter_averaging(period: int | PeriodRule = 10, optimizer_state: bool = True, route: Route = native) -> Strategy:
    """Average the models every `period` steps, and with them the optimizers' state.

    θ ← Σᵢ (1/N) θᵢ at steps H, 2H, … With `optimizer_state` the moments (momentum, Adam's m and v) are averaged too, as
    DL4J does: all floating-point tensors of the optimizer's state, each in its own dtype. Counts of steps are the same
    everywhere; codes and lists of tensors have no mean, and are refused (ValueError), of LBFGS when it is built, else
    when they are met. So that all have the same state, a parameter without a gradient counts as if its gradient were 0.

    Each worker's step is its own optimizer's, with its weight decay and its schedule. With H = 1 and plain SGD or
    momentum this equals synchronous SGD; with an optimizer that divides by the gradient's size it does not.

    In an elastic run a round ends immediately where a worker is lost: see `local_sgd`. Newcomers get the averaged
    moments, too.

    Cost: the route's, once in H steps, on the parameters (and one more buffer for each moment).

    Source: D. Povey, X. Zhang and S. Khudanpur, "Parallel training of DNNs with natural gradient and parameter
    averaging", 2014; P. Moritz et al., "SparkNet", 2016.
    """
    return Strategy(
        call_name(parameter_averaging, locals()),
        parameters=every(period, mean(route)),
        synchronized=period == 1,
        carries_optimizer=optimizer_state,
    )
