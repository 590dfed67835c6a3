"""Synchronous SGD: one gradient, averaged over all workers, every step."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, call_name, native


def sync_sgd(route: Route = native) -> Strategy:
    """Average the gradients of all workers before every step.

    g = Σᵢ (nᵢ/n) gᵢ, so N workers with n/N samples each do what one worker does with n samples, whatever
    the optimizer. `route` is `native`, `ring`, `tree`, `halving_doubling`, `star` or `hierarchical()`.

    Cost: the route's, once a step.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio and R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016.
    """
    return Strategy(call_name(sync_sgd, locals()), gradients=mean(route))
