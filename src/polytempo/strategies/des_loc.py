"""DES-LOC: local steps of an adaptive optimizer; parameters, momenta and second moments each meet at their own time."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Route, Strategy, call_name, chain, native
from polytempo.core.transform import only
from polytempo.synchronization import every

_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum")
"""Names of second moments in the optimizers of torch."""


def des_loc(period: int = 8, momentum_period: int = 16, variance_period: int = 32, route: Route = native) -> Strategy:
    """Average parameters every H, momenta every Hₘ and second moments every Hᵥ steps; workers step alone between.

        θ ← Σᵢ θᵢ / N at steps H, 2H, …     m ← Σᵢ mᵢ / N at Hₘ, 2Hₘ, …     v ← Σᵢ vᵢ / N at Hᵥ, 2Hᵥ, …

    with H = `period`, Hₘ = `momentum_period` and Hᵥ = `variance_period`. v changes over 1 / (1 - β₂) steps, a thousand
    by Adam's usual β₂, so it may meet more rarely than m, and m more rarely than θ. With three equal periods it is
    `parameter_averaging`, and with moments that never meet `local_sgd`. Second moments are told by their names in the
    optimizers of torch; other tensors of an optimizer's state count as momenta.

    Each worker's step is its own optimizer's. State without a mean is refused as by `parameter_averaging`. Elastic runs
    refuse it: a round that ends early cannot end three periods.

    Cost: the route's on the parameters once in H steps, on momenta once in Hₘ, on second moments once in Hᵥ: for Adam
    1/H + 1/Hₘ + 1/Hᵥ of synchronous SGD's bytes, where averaging all of them takes 3/H.

    Source: A. Iacob et al., "DES-LOC: desynced low communication adaptive optimizers for training foundation models",
    2025.
    """
    meet = mean(route)
    return Strategy(
        call_name(des_loc, locals()),
        parameters=chain(
            every(period, only(lambda name: "|" not in name, meet)),
            every(momentum_period, only(lambda name: "|" in name and not _is_second(name), meet)),
            every(variance_period, only(_is_second, meet)),
        ),
        synchronized=period == momentum_period == variance_period == 1,
        carries_optimizer=True,
    )


def _is_second(name: str) -> bool:
    return name.rpartition("|")[2] in _SECOND and "|" in name
