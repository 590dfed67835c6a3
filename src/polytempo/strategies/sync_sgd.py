"""Synchronous SGD: one gradient, averaged over all workers, every step."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.collectives.invariant import Invariant
from polytempo.core import Route, Strategy, call_name, native
from polytempo.core.strategy import ByMessages, InSlices


def sync_sgd(route: Route = native) -> Strategy:
    """Average the gradients of all workers before every step.

    g = Σᵢ (nᵢ/n) gᵢ, so N workers with n/N samples each do the work of one worker with n samples, for any
    optimizer. `route` is `native`, `ring`, `tree`, `halving_doubling`, `star`, `hierarchical()` or
    `invariant()`. With the last the weights have the same bits for any number of workers up to its slices, as long as
    the global batch is the same (option `global_batch_size`).

    Cost: the route's, once a step. With `invariant`: a backward pass for each slice instead of one for each rank, and
    an exchange that begins behind the last one.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio and R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016.
    """
    meeting = InSlices(route.slices) if isinstance(route, Invariant) else ByMessages()
    return Strategy(call_name(sync_sgd, locals()), gradients=mean(route), meeting=meeting)
