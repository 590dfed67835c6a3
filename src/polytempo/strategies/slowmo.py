"""SlowMo: rounds of a distributed strategy, with a slow momentum from round to round."""

from __future__ import annotations

from polytempo.aggregation import from_anchor, heavy_ball, mean
from polytempo.core import Route, Strategy, call_name, chain, native
from polytempo.core.strategy import checked_inner
from polytempo.synchronization import PeriodRule, every


def slowmo(
    period: int | PeriodRule = 12,
    slow_lr: float = 1.0,
    slow_momentum: float = 0.5,
    route: Route = native,
    inner: Strategy | None = None,
) -> Strategy:
    """Add the movement of the workers' mean in `period` steps to a momentum, and move all workers by it.

    Δ = θ_anchor - mean(θᵢ); u ← βu + Δ; θ_anchor ← θ_anchor - α u, with α = `slow_lr` and β = `slow_momentum`.

    `inner` is the strategy within a round: local SGD without it, or a strategy that exchanges by
    messages, such as `gossip()` or `stochastic_gradient_push()`. With α = 1 and β = 0 it is local SGD. With period 1,
    α = 1 and plain SGD it is synchronous SGD with momentum β. A movement that repeats adds up to α / (1 - β) times
    itself: twice by the defaults. With a larger β, such as 0.7 (3.3 times), take a smaller learning rate.

    Block momentum (BMUF: K. Chen and Q. Huo, 2016) is this with β = 1 - 1/N and α = 1: v ← μv + ζ (mean(θᵢ) - θ_anchor)
    is -ζu, so a learning rate ζ of a block is α, and its momentum μ is β.

    In an elastic run it behaves as `diloco`; an `inner` strategy is refused there.

    Cost: the cost of `inner`, and the route's once in τ = `period` steps; memory for the anchor and the momentum.

    Source: J. Wang, V. Tantia, N. Ballas and M. Rabbat, "SlowMo: improving communication-efficient distributed SGD with
    slow momentum", 2020, algorithm 1; its inner optimizers keep their state here ("maintain"). Deviation: there u is
    divided by the learning rate of its round and multiplied by the rate of the next one; here a change of the rate does
    not change past movement.
    """
    slow = every(period, from_anchor(chain(mean(route), heavy_ball(slow_lr, slow_momentum))))
    name = call_name(slowmo, locals(), brief=("inner",))
    if inner is None:
        return Strategy(name, parameters=slow, synchronized=period == 1)
    checked_inner(inner, "slowmo")
    return Strategy(
        name,
        gradients=inner.gradients,
        parameters=chain(inner.parameters, slow),
        synchronized=inner.synchronized or period == 1,
        momentum=inner.momentum,
    )
