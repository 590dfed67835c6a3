"""SPARTA: every step workers average a small share of their parameters, drawn by chance."""

from __future__ import annotations

from dataclasses import replace

from polytempo.aggregation import mean
from polytempo.compression import masked
from polytempo.core import Route, Strategy, call_name, chain, native
from polytempo.core.strategy import checked_inner
from polytempo.synchronization import every


def sparta(
    share: float = 0.005, period: int = 1, seed: int = 0, route: Route = native, outer: Strategy | None = None
) -> Strategy:
    """Average p = `share` of each tensor's elements over all workers after every step; the others stay.

    θᵢ ← m ⊙ mean θ + (1 - m) ⊙ θᵢ, with a mask m that all workers draw alike from (`seed`, step). An element is
    averaged once in 1/p steps, in the mean over steps, so models stay near each other; their mean stays where it was.
    With p = 1 it is `local_sgd(period)`, to the bit. `period`: steps between two averages of a share.

    `outer`: a strategy that goes on behind it, such as `diloco(period=1000)`: workers that drift less bear longer
    periods. It sees the parameters after the average of the step, which has left their mean where it was.

    In an elastic run it behaves as `gossip`; with `outer` it is refused (PT1208).

    Cost: the route's for p K bytes in each step; with `outer` that one's, too. Alone it keeps nothing between steps.

    Source: EXO Labs, "Improving the efficiency of distributed training using sparse parameter averaging", 2025, as in
    their `gym`. Deviations: ⌈p n⌉ elements of n, where there each is drawn apart and rank 0 broadcasts the mask;
    tensors without a gradient are averaged, too.
    """
    name = call_name(sparta, locals(), brief=("outer",))
    parts = every(period, masked(share, mean(route), seed))
    if outer is None:
        return Strategy(name, parameters=parts, synchronized=share == period == 1)
    checked_inner(outer, "sparta")
    return replace(outer, name=name, parameters=chain(parts, outer.parameters))
