"""CO2: SlowMo with an exchange that goes on behind the whole next round of local steps."""

from __future__ import annotations

from polytempo.aggregation import from_anchor, heavy_ball, mean
from polytempo.core import Route, Strategy, call_name, chain, native
from polytempo.synchronization import delayed, every


def co2(
    period: int = 12,
    slow_lr: float = 0.5,
    slow_momentum: float = 0.2,
    clip: float | None = None,
    route: Route = native,
) -> Strategy:
    """Begin the exchange of a round's movement, and step by the movement of the round before, which has arrived.

    After round k of H = `period` steps: Δₖ = φ - mean(θᵢ) begins to travel; u ← clip(βu + Δₖ₋₁); φ ← φ - α u; θᵢ ← φ,
    with α = `slow_lr` and β = `slow_momentum`. Each round's movement counts once, a round late: after the first round
    all return to φ. So a link may be so slow that an exchange takes H steps, and no worker waits.
    `clip`: the largest size of an element of u.

    It is `slowmo` with a delay of a round. Steps by late movement swing over where rounds are long; so α / (1 - β), how
    far a movement that repeats goes in all, is 0.6 by the defaults, where `slowmo` has 2. With H = 1, α = 1, β = 0 and
    plain SGD it is `delayed_sgd(1)`.

    Elastic runs refuse it: an exchange is under way when a step ends.

    Cost: the route's once in H steps, all of it behind computation; memory for φ, u, and movements on their way.

    Source: W. Sun, Z. Qin, W. Sun et al., "CO2: efficient distributed training with full communication-computation
    overlap", 2024. Deviations: no penalty of the staleness gap, which is 1 by default in the released code, too; its
    clip drops its result, and is none. u is in units of parameters, as in `slowmo`.
    """
    meet = chain(delayed(1, mean(route)), heavy_ball(slow_lr, slow_momentum, clip))
    return Strategy(
        call_name(co2, locals(), brief=("clip",)), parameters=every(period, from_anchor(meet)), synchronized=False
    )
