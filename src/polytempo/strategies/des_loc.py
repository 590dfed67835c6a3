"""DES-LOC: local steps of an adaptive optimizer; parameters, momenta and second moments each meet at their own time."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Bundle, Cost, Port, Promise, Route, State, Strategy, Transform, call_name, chain, native
from polytempo.core.transform import only
from polytempo.synchronization import every

_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum")
"""Names of second moments in the optimizers of torch."""
_MOST = 7.3
"""The largest |m| / √v of Adam with β₁ = 0.9 and β₂ = 0.999: (1 - β₁) / √((1 - β₂) (1 - β₁²/β₂)), rounded up."""


def des_loc(period: int = 8, momentum_period: int = 16, variance_period: int = 32, route: Route = native) -> Strategy:
    """Average parameters every H, momenta every Hₘ and second moments every Hᵥ steps; workers step alone between.

        θ ← Σᵢ θᵢ / N at steps H, 2H, …     m ← Σᵢ mᵢ / N at Hₘ, 2Hₘ, …     v ← Σᵢ vᵢ / N at Hᵥ, 2Hᵥ, …

    with H = `period`, Hₘ = `momentum_period` and Hᵥ = `variance_period`. v changes over 1 / (1 - β₂) steps, a thousand
    by Adam's usual β₂, so it may meet more rarely than m, and m more rarely than θ. With three equal periods it is
    `parameter_averaging`, and with moments that never meet `local_sgd`. Second moments are known by their names in the
    optimizers of torch; other tensors of an optimizer's state count as momenta.

    Where m has met and v has not, an element may have others' gradients in m and none of them in a worker's own v: its
    step m / √v would have no bound. So |m| ≤ 7.3 √v then, which a worker's own Adam keeps with β = 0.9 and 0.999; where
    v has met in the same step, this changes nothing.

    Each worker's step is its own optimizer's. State without a mean is refused as by `parameter_averaging`. Elastic runs
    refuse it: a round that ends early cannot end three periods.

    Cost: the route's on the parameters once in H steps, on momenta once in Hₘ, on second moments once in Hᵥ: for Adam
    1/H + 1/Hₘ + 1/Hᵥ of synchronous SGD's bytes, where averaging all of them takes 3/H.

    Source: A. Iacob et al., "DES-LOC: desynced low communication adaptive optimizers for training foundation models",
    2025. Deviation: the bound of m.
    """
    meet = mean(route)
    return Strategy(
        call_name(des_loc, locals()),
        parameters=chain(
            every(period, only(lambda name: "|" not in name, meet)),
            every(variance_period, only(_is_second, meet)),
            every(
                momentum_period,
                chain(only(lambda name: "|" in name and not _is_second(name), meet), _within_variance()),
            ),
        ),
        synchronized=period == momentum_period == variance_period == 1,
        carries_optimizer=True,
    )


def _is_second(name: str) -> bool:
    return "|" in name and name.rpartition("|")[2] in _SECOND


def _within_variance() -> Transform:
    """|m| ≤ 7.3 √v, in elements of Adam's kin."""

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        present = dict(bundle.views if bundle.packed else bundle.tensors)
        changed = False
        for name in bundle.names:
            of, _, key = name.rpartition("|")
            second = present.get(f"{of}|exp_avg_sq") if key == "exp_avg" else None
            if second is not None:
                most = second.sqrt() * _MOST
                present[name] = present[name].clamp(-most, most)
                changed = True
        return (Bundle(present, bundle.share) if changed else bundle), state

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost()

    return Transform(lambda parameters: None, apply, ~Promise(0), cost)
