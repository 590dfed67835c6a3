"""Dion: orthogonal updates of low rank, from momenta that stay with the workers; two thin matrices travel for each."""

from __future__ import annotations

from polytempo.aggregation import low_rank_directions
from polytempo.core import Route, Strategy, call_name, native


def dion(
    rank: int = 8,
    momentum: float = 0.95,
    scale: float = 0.02,
    but: str = "",
    route: Route = native,
    exact_below: int = 1024,
) -> Strategy:
    """Keep Mᵢ, a momentum with error feedback, at worker i; step along scale √(n/m) P̂ Qᵀ of the mean's largest parts.

    See `aggregation.low_rank_directions`; each matrix by rank `rank`, μ = `momentum`. The
    optimizer's learning rate, weight decay and momentum act as on any gradient. By the default `scale` SGD's usual rate
    of 0.1 with a momentum of 0.9 moves matrices as far as the 0.02 of the released code; without that momentum take
    `scale=0.2`. Parameters with a name that has one of the parts in `but` (such as "embedding, head",
    which a shape cannot tell), vectors, and tensors of fewer than `exact_below` elements keep the mean gradient.
    N workers make the steps of one with the joined batch, to rounding.

    Cost: the route's for r (n + m) numbers in place of n m, in two all-reduces; memory for M and Q.

    Source: K. Ahn, B. Xu, N. Abreu et al., "Dion: distributed orthonormalized updates", 2025, its data-parallel
    form. Deviation: a rank for all matrices, where the paper has a part of min(n, m).
    """
    parts = tuple(part.strip() for part in but.split(",") if part.strip())
    return Strategy(
        call_name(dion, locals()),
        gradients=low_rank_directions(rank, momentum, scale, parts, route, exact_below=exact_below),
    )
