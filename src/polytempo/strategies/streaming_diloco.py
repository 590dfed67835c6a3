"""Streaming DiLoCo: fragments of the model meet in turns, behind the computation."""

from __future__ import annotations

from polytempo.aggregation import Merge, from_anchor
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Codec, Route, Strategy, Transform, call_name, chain, native
from polytempo.strategies.diloco import mean_movement, outer_step
from polytempo.synchronization import behind, blended, every
from polytempo.synchronization import fragments as in_turns
from polytempo.synchronization.fragments import Blend, check_blend


def streaming_diloco(
    period: int = 16,
    fragments: int = 2,
    delay: int = 1,
    blend: Blend = 0.5,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    route: Route | WireRoute = native,
    codec: Codec | None = None,
    outer_optimizer: Transform | None = None,
    merge: Merge | None = None,
) -> Strategy:
    """DiLoCo by fragments: each meets once in `period` steps, at a step of its own, and its answer comes later.

    For fragment p of P = `fragments`, H = `period`, at steps t = (p + 1) H/P, and every H steps from there on:

        step t             Δ = φ_p - mean(θ_p); v ← μv + Δ; φ_p ← φ_p - α (Δ + μv)       while training goes on
        step t + τ         θ_p ← a θ_p + (1 - a) φ_p

    with τ = `delay`, a = `blend`, α = `outer_lr` and μ = `outer_momentum`. `blend="keep"` is θ_p ← φ_p + (θ_p - θ_p at
    step t): nothing of these τ steps is lost. The next Δ is counted from the new φ_p though θ_p differs from it, so the
    part of these steps that stays is sent then, and none twice. Fragments are of whole tensors in the model's order,
    about equally large; the inner optimizers keep their state. With P = 1, τ = 0 and a = 0 it is `diloco`; with a = 1
    no worker hears of others.

    With a `codec` each worker's movement is encoded; see `local_sgd`. `outer_optimizer` is as in `diloco`, and
    `merge` as in `local_sgd`, for each fragment's movements. Elastic runs refuse it: fragments' exchanges are under way
    when a step ends.

    Cost: the bytes of `diloco` in H steps, at most one fragment's at a time: the peak is 1/P. Memory for φ, v, and the
    answers on their way. ValueError for τ ≥ H, and for P > H.

    Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, algorithm 2; `blend="keep"` is
    by LOSCAR-SGD, 2026. Deviations: fragments follow the order of parameters, where the paper strides over layers; the
    outer momentum is 0.5 in place of 0.9, as in `diloco`.
    """
    check_blend(blend)
    outer = outer_step(outer_lr, outer_momentum, outer_optimizer)

    def fragment(p: int, first: int) -> Transform:
        meet = from_anchor(chain(mean_movement(route, codec, merge), outer))
        if delay != 0:
            return behind(delay, meet, period, first, blend, p, fragments)
        return every(period, meet if blend == "keep" else blended(blend, meet), first)

    return Strategy(
        call_name(streaming_diloco, locals()),
        parameters=in_turns(fragments, period, fragment),
        synchronized=False,
    )
