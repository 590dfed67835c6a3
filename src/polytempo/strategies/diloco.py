"""DiLoCo: many local steps, then one step of an outer optimizer on the workers' movement."""

from __future__ import annotations

from polytempo.aggregation import Merge, from_anchor, mean, merged, nesterov
from polytempo.compression import all_gather, reduce_scatter, through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Codec, Route, Strategy, Transform, call_name, chain, native
from polytempo.core.calls.refusals import refuse
from polytempo.core.codec import check_codec
from polytempo.core.cost import route_name
from polytempo.synchronization import PeriodRule, every


def diloco(
    period: int | PeriodRule = 16,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    route: Route | WireRoute = native,
    codec: Codec | None = None,
    outer_optimizer: Transform | None = None,
    merge: Merge | None = None,
) -> Strategy:
    """Take the workers' mean movement in `period` local steps as the gradient of a Nesterov step.

    Δ = θ_anchor - mean(θᵢ); v ← μv + Δ; θ_anchor ← θ_anchor - lr · (Δ + μv). Inner optimizers keep their state. With
    outer_lr = 1 and outer_momentum = 0 it is local SGD. With a `codec`, Δ is the mean of decode(encode(θ_anchor - θᵢ)):
    write `codec=feedback(top_k(0.1))`, because the part that a codec without feedback leaves out is lost. The outer
    momentum amplifies late parts, so a codec that sends a hundredth needs a smaller outer_lr. `route` is as in
    `local_sgd`.

    `outer_optimizer` makes another step of Δ than Nesterov's: `adam()`, `schedule_free()`, `delayed_nesterov()`,
    `heavy_ball()` or `nesterov()` of `polytempo.aggregation`, or a transform of your own. It has a rate of its own.
    `merge` is as in `local_sgd`.

    In an elastic run a round ends immediately where a worker is lost: the outer step is made of the others' movement,
    and the lost worker's samples since the last one are dealt again. Newcomers get the anchor and the outer momentum,
    which all workers have alike, from a living one.

    Cost: the route's, once in H steps; memory for the anchor and the outer momentum, and for a codec's residual.
    A movement that repeats adds up to lr / (1 - μ) times itself: 1.4 times by the defaults, so that an inner learning
    rate that was tuned for another strategy is not too large. Deviation: the paper's outer momentum is 0.9 (7 times),
    with AdamW inside, a learning rate that decays, and H = 500; with `outer_momentum=0.9` take a seventh of the rate.

    Source: A. Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
    """
    outer = outer_step(outer_lr, outer_momentum, outer_optimizer)
    meet = chain(mean_movement(route, codec, merge), outer)
    return Strategy(
        call_name(diloco, locals()),
        parameters=every(period, from_anchor(meet)),
        synchronized=period == 1,
    )


def outer_step(lr: float, momentum: float, optimizer: Transform | None) -> Transform:
    """The outer optimizer: `optimizer`, or Nesterov's steps. ValueError for both."""
    if optimizer is None:
        return nesterov(lr, momentum)
    if (lr, momentum) != (0.7, 0.5):
        raise ValueError(
            f"outer_lr={lr} and outer_momentum={momentum} belong to Nesterov's steps, and outer_optimizer="
            f"{optimizer.name or 'a transform'} has numbers of its own; give one or the other"
        )
    return optimizer


def mean_movement(route: Route | WireRoute, codec: Codec | None, merge: Merge | None = None) -> Transform:
    """The mean or the `merge` of the workers' movement, by `codec` if there is one; `native` then suits the codec.

    `Incompatible` (PT1730) for a merge and a route of sums.
    """
    if merge is not None and route not in ((native,) if codec is None else (native, all_gather, reduce_scatter)):
        refuse({"merge", "route"}, merge=route_name(merge), route=route_name(route))
    if codec is None:
        return mean(route) if merge is None else merged(merge)  # type: ignore[arg-type]
    check_codec(codec)
    if codec.facts.memory == "own":
        raise ValueError(
            f"{codec.facts.name} adds momentum to gradients, and a worker's movement has its optimizer's already; use "
            "codec=feedback(top_k(…))"
        )
    return through(codec, merge, None if route is native else route)
