"""Delayed SGD: the averaged gradient arrives d steps late, behind the computation of the next."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, call_name, native
from polytempo.synchronization import delayed


def delayed_sgd(delay: int = 1, route: Route = native) -> Strategy:
    """Apply at step t the mean gradient of step t - `delay`; its exchange overlaps the steps between.

    θ_{t+1} = θ_t - η · mean(gᵢ(θ_{t-d})). The first d steps apply nothing, neither weight decay nor momentum, but a
    schedule counts them. Weight decay is of the present parameters. The learning rate that is stable shrinks with the
    delay.

    Cost: synchronous SGD's bytes; its time hides behind d steps of computation (on real processes with the
    route `native`: a route of our own goes on only while it is waited for). Memory for d more gradients.

    Source: J. Langford, A. Smola and M. Zinkevich, "Slow learners are fast", 2009; Y. Li et al., "Pipe-SGD", 2018.
    """
    return Strategy(call_name(delayed_sgd, locals()), gradients=delayed(delay, mean(route)))
