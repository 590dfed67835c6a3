"""Distributed Muon: the mean gradient's momentum made orthogonal, each matrix by one worker."""

from __future__ import annotations

from polytempo.aggregation import mean, orthogonal_momentum
from polytempo.core import Route, Strategy, call_name, chain, native


def distributed_muon(momentum: float = 0.95, scale: float = 0.02, but: str = "", route: Route = native) -> Strategy:
    """Average gradients; of each matrix m ← μm + (1 - μ)g; the optimizer's gradient is the orthogonal factor of it.

    See `aggregation.orthogonal_momentum`: five Newton-Schulz steps on (1 - μ) g + μm, times `scale` √max(1, rows /
    columns); μ = `momentum`. The optimizer's learning rate, weight decay and momentum act as on any gradient.
    By the default scale SGD's usual rate of 0.1 with a momentum of 0.9 moves matrices as far as the 0.02 of the
    released code; without that momentum take `scale=0.2`. Vectors, and parameters with a name that has one of the parts
    in `but` (such as "embedding, head", which a shape cannot tell), keep the mean gradient.

    Workers share the matrices, the largest first; a parameter without a gradient has a gradient of zeros, so that all
    gather alike. Each matrix has the bits of one worker, so all end with the same.

    Cost: synchronous SGD's, and an all-gather of the matrices; Newton-Schulz's operations divided by N; memory for m.

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with its distributed
    code. Deviations: float32 instead of bfloat16 within the steps; m is kept by all workers, so that they may come and
    go; vectors go to SGD in the place of AdamW.
    """
    parts = tuple(part.strip() for part in but.split(",") if part.strip())
    return Strategy(
        call_name(distributed_muon, locals()),
        gradients=chain(mean(route), orthogonal_momentum(momentum, scale, parts)),
    )
