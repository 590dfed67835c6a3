"""DiLoCo: many local steps, then one step of an outer optimizer on what the workers moved."""

from __future__ import annotations

from polytempo.aggregation import from_anchor, mean, nesterov
from polytempo.core import Route, Strategy, chain, native, spelled
from polytempo.synchronization import every


def diloco(period: int = 16, outer_lr: float = 0.7, outer_momentum: float = 0.9, route: Route = native) -> Strategy:
    """After `period` local steps, the mean movement of the workers is the gradient of a Nesterov step.

    Δ = θ_anchor - mean(θᵢ); v ← μv + Δ; θ_anchor ← θ_anchor - lr · (Δ + μv). Inner optimizers keep their state.
    With outer_lr = 1 and outer_momentum = 0 it is local SGD.

    Cost: the route's, once in H steps; memory for the anchor and the outer momentum.
    The paper uses AdamW inside and H = 500; its outer constants (0.7, 0.9) are the defaults here.

    Source: A. Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
    """
    return Strategy(
        spelled("diloco", period=period, outer_lr=outer_lr, outer_momentum=outer_momentum, route=route),
        parameters=every(period, from_anchor(chain(mean(route), nesterov(outer_lr, outer_momentum)))),
        in_step=period == 1,
    )
