"""ACCO: one half of an update's gradients travels while the other half is computed, at an estimate of the update."""

from __future__ import annotations

from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import (
    Bundle,
    Codec,
    Cost,
    Port,
    Promise,
    Route,
    State,
    Strategy,
    Transform,
    call_name,
    chain,
    native,
)
from polytempo.core.cost import num_bytes
from polytempo.core.state import ProvisionalState
from polytempo.strategies.diloco import mean_movement
from polytempo.synchronization import delayed


def acco(route: Route | WireRoute = native, codec: Codec | None = None) -> Strategy:
    """Exchange a step's gradients during the next step, and make one update of the gradients of two steps.

        step      gradients     meanwhile arrives    the optimizer's step (θ, with its state s)
        2t        aₜ at θ̃ₜ       bₜ₋₁                 θₜ from θₜ₋₁, by (aₜ₋₁ + bₜ₋₁) / 2
        2t + 1    bₜ at θₜ      aₜ                   θ̃ₜ₊₁ from θₜ, by aₜ; then s returns, and θₜ before the next step

    a and b are means over the workers, θ̃₀ = θ₀, and step 0 changes nothing. The estimate θ̃ takes the place of an update
    until its second half has arrived: a loss with curvature c is stable up to a rate of 2 / c, as with synchronous SGD,
    where `delayed_sgd(1)` is up to 1 / c. If gradients do not depend on θ, an odd number of steps is synchronous SGD
    with joined pairs of batches.

    So 2k steps with batches of n samples are k updates by 2n samples: take the learning rate of these. A schedule
    counts steps. All of the optimizer's state returns, step counts included, also to no state at first; counts in
    parameter groups, of some optimizers that are not torch's, do not. After an even number of steps the model is an
    estimate, by the first half of an update, and parameters that a loop changes there return with it; `load_state_dict`
    is kept. With a `codec`, the workers' gradients are encoded: write `codec=feedback(top_k(0.1))`. `route` is as in
    `local_sgd`.

    Elastic runs refuse it: an exchange is under way when a step ends. Within `slowmo`, `islands` and `codistillation`
    it is refused, because their changes between steps would be undone; so is LBFGS.

    Cost: synchronous SGD's bytes, behind computation as in `delayed_sgd`; memory for two gradients, for θₜ, and during
    every second step for a copy of the optimizer's state.

    Source: A. Nabli, L. Fournier, P. Erbacher, L. Serrano, E. Belilovsky and E. Oyallon, "ACCO: accumulate while you
    communicate for communication-overlapped sharded LLM training", 2024. Deviations: a half is a step's batch, and both
    count the same, where workers there compute gradients until an exchange is over and all count by their number; each
    worker has the whole optimizer, which is divided there; a schedule goes on in both halves.
    """
    return Strategy(call_name(acco, locals()), gradients=chain(delayed(1, mean_movement(route, codec)), _halves()))


def _halves() -> Transform:
    """One update of two answers.

    call          1              2             3              4
    hands out     a              (a + b) / 2   c              (c + d) / 2
    step          provisional                  provisional
    """

    async def apply(port: Port, bundle: Bundle, state: ProvisionalState) -> tuple[Bundle | None, State]:
        if state.coming:
            return bundle, ProvisionalState(False, bundle.copy())
        return bundle.with_flat(state.inner.flat.lerp(bundle.flat, 0.5)), ProvisionalState(True, None)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost(memory_bytes=2 * num_bytes(parameters))  # a, and the parameters before a provisional step

    promises = Promise.SEPARABLE | Promise.WEIGHS
    return Transform(lambda parameters: ProvisionalState(True, None), apply, promises, cost)
