"""DDG: no stage waits for another; the gradients of earlier stages are late."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.schedules import Correction
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def ddg(
    stages: int = 2,
    weights: str = "stashed",
    lockstep: bool = False,
    correction: Correction | None = None,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Each step a stage takes a new batch forward and an older one back, and updates by that one's gradient.

    w(k) ← w(k) - γ ∇f(x(t - d(k))),    d(k) = K-1-k steps late at stage k of K; the last stage is not late

    `weights`: "stashed" takes the gradient at the parameters of its forward pass, as the theory has it; "current"
    multiplies by the present ones on the way back, as the authors' code does. With `lockstep` all stages end a step
    before one begins the next, as the paper times it. At the end of a run the gradients under way come back. Use a
    learning rate that is smaller by about the delay.

    `correction`: `pipemare(anneal_steps=1000)` or `spectrain()` of `pt.partition.schedules`, against the delay.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: no bubble; stage k holds K-k batches, and with "stashed" as many versions of its parameters.

    Source: Z. Huo et al., "Decoupled parallel backpropagation with convergence guarantee", 2018.
    """
    if weights not in ("stashed", "current"):
        raise ValueError(f"weights is 'stashed' or 'current', got {weights!r}")
    schedule = schedules.ddg(stages, weights=weights, lockstep=lockstep, correction=correction)  # type: ignore[arg-type]  # checked above
    return staged_strategy(ddg, locals(), schedule, inner or sync_sgd(), brief=("correction",))
