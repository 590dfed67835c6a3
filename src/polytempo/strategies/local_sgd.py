"""Local SGD: H steps alone, then the mean of the models; optimizers stay local."""

from __future__ import annotations

from polytempo.aggregation import Merge, from_anchor
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Codec, Route, Strategy, call_name, native
from polytempo.strategies.diloco import mean_movement
from polytempo.synchronization import PeriodRule, every


def local_sgd(
    period: int | PeriodRule = 8,
    route: Route | WireRoute = native,
    codec: Codec | None = None,
    merge: Merge | None = None,
) -> Strategy:
    """Every worker takes `period` steps of its own, then all continue from the mean of their models.

    θ ← Σᵢ (1/N) θᵢ at steps H, 2H, … ; momentum and other state stay with the worker. With a `codec`, each worker's
    movement since then is encoded: θ ← θ_last - Σᵢ (1/N) decode(encode(θ_last - θᵢ)). Write
    `codec=feedback(top_k(0.1))`, because the part that a codec without feedback leaves out is lost.

    `route`: how models are added up; `native` leaves that to the world. With a `codec`, `native` leaves it to the codec
    (in `compression.through` that is route=None), and its wire routes can be given, too, such as `all_gather`.

    `merge` makes one movement of all workers' movements in the place of their mean: θ ← θ_last - merge(θ_last - θ₁, …).
    It is one of `polytempo.aggregation`, as for `robust_sgd`, or a function of your own. `nearest_to_median(wrong)`
    takes the mean of the workers that agree the most, and suits whole movements. Workers then count the same, and sums
    by a `route` are refused (PT1730). Running statistics are merged alike. Models between meetings are averaged for
    scores as always, wrong ones too: let a run end with a meeting.

    In an elastic run a round ends immediately where a worker is lost: the others average their models; the lost
    worker's steps since the last average are lost, and their samples are dealt again. Newcomers get the average.

    Cost: 1/H of synchronous SGD's communication, with a merge 1/H of `robust_sgd`'s; memory for θ_last with one of the
    two, and for a codec's residual.

    Source: S. U. Stich, "Local SGD converges fast and communicates little", 2019; with a codec, D. Basu, D. Data,
    C. Karakus and S. Diggavi, "Qsparse-local-SGD", 2019.
    """
    meet = mean_movement(route, codec, merge)
    return Strategy(
        call_name(local_sgd, locals()),
        parameters=every(period, meet if codec is None and merge is None else from_anchor(meet)),
        synchronized=period == 1,
    )
