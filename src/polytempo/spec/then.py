"""`then`: a strategy after another one, as in a warm start."""

from __future__ import annotations

from dataclasses import replace

from polytempo.core.calls.call_name import call_name
from polytempo.core.strategy import Before, Strategy

__all__ = ["then"]


def then(first: Strategy, after: int, second: Strategy) -> Strategy:
    """Train by `first` for `after` steps, then by `second`, which begins with the model that `first` has left.

        pt.run("digits", pt.then(pt.strategies.downpour(), 2000, pt.strategies.sync_sgd()), workers=4, out="runs/two")

    It is a run of `first` with `steps=after`, in the folder `01-…` within the run's, and a run of `second` with
    `start_from` that folder: the bits are equal to the two commands' bits, in both worlds. So parameters and buffers
    go over; optimizer, schedule, order of samples and the second strategy's state begin as in any run, and `epochs`,
    `steps` and `until` are the second run's. A run with a parameter server counts a step when each worker has done a
    batch. The result is the second's; `started_from` names the first. `resume` goes on in the run that was interrupted.

    `second` may be a `then`, too: its own `after` counts from its own beginning. On the command line it is written
    'then(downpour(), 2000, sync_sgd())'.

    Errors: ValueError unless `after` is a whole number above 0. `Incompatible` (PT2004 to PT2008) in a loop of your
    own, a `Trainer`, a world that another launcher has started, with `meta`, and inside another strategy.
    Source: asynchronous SGD that one replica, or synchronous steps, warm up: J. Dean et al., "Large scale distributed
    deep networks", 2012, section 4.1 (one replica before the others join); the other direction is the same exchange.
    """
    if isinstance(after, bool) or not isinstance(after, int) or after < 1:
        raise ValueError(f"then: after is {after!r}; give the steps of {first}, a whole number above 0")
    name = call_name(then, locals())
    if second.before is not None:  # the chain from its beginning: its parts follow one after the other
        first, after = then(first, after, second.before.strategy), second.before.steps
    return replace(second, name=name, before=Before(first, after))
