"""Post-local SGD: synchronous at first, local steps once the model has settled."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, call_name, native
from polytempo.synchronization import PeriodRule, after, every, until


def post_local_sgd(switch_step: int = 100, period: int | PeriodRule = 8, route: Route = native) -> Strategy:
    """Synchronous SGD for `switch_step` steps, then local SGD with `period`.

    The paper switches at the first decay of the learning rate. From the switch on, momentum and other state are each
    worker's own.

    In an elastic run the steps before the switch are steps of `sync_sgd`, and the others of `local_sgd`.

    Cost: synchronous SGD's until the switch, 1/H of it afterwards.

    Source: T. Lin, S. U. Stich, K. K. Patel and M. Jaggi, "Don't use large mini-batches, use local SGD", 2020.
    """
    return Strategy(
        call_name(post_local_sgd, locals()),
        gradients=until(switch_step, mean(route)),
        parameters=after(switch_step, every(period, mean(route))),
        synchronized=period == 1,
    )
