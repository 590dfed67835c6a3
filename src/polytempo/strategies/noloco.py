"""NoLoCo: DiLoCo without a meeting of all; each worker meets one other, drawn in each round."""

from __future__ import annotations

from polytempo.aggregation import mix_anchors, random_pairs
from polytempo.core import Strategy, call_name
from polytempo.synchronization import every


def noloco(period: int = 16, outer_lr: float = 0.7, outer_momentum: float = 0.5, seed: int = 0) -> Strategy:
    """Every H = `period` steps mix parameters and anchors with one partner, and step by the outer momentum.

    v ← μv + α ((φ̄ - θ̄) + (φᵢ - φ̄)); φᵢ ← φᵢ - v; θᵢ ← φᵢ, where θ̄ and φ̄ are the pair's means, α = `outer_lr` and
    μ = `outer_momentum`. The last term draws the workers' anchors together. With two workers it is SlowMo with
    α and μ, which is DiLoCo with heavy ball; with α = 1 and μ = 0 it is `gossip(random_pairs(seed), period)`. The mean
    of all anchors moves as SlowMo's, for any pairs, where gradients do not depend on θ.

    In an elastic run it behaves as `gossip`; a newcomer gets the first worker's anchor and momentum.

    Cost: twice the parameters to one worker in H steps, for any number of workers; memory for φ and v.

    Source: J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy and C. Nies, "NoLoCo: no-all-reduce low communication
    training method for large models", 2025. Deviations: one rate α for both terms, as in the released code; pipelines
    are not rewired.
    """
    return Strategy(
        call_name(noloco, locals()),
        parameters=every(period, mix_anchors(random_pairs(seed), outer_lr, outer_momentum)),
        synchronized=False,
    )
