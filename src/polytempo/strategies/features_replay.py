"""Features Replay: DDG that keeps inputs only and computes activations again."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.schedules import Correction
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def features_replay(
    stages: int = 2,
    lockstep: bool = False,
    correction: Correction | None = None,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Run `ddg` with late backward passes that compute a batch's activations again, with the present parameters.

    w(k) ← w(k) - γ ∇f(w(t); h(t - d(k))),    d(k) = K-1-k; h is the output of the stage before at that time

    Running statistics and dropout masks are as in the first pass. `lockstep`: as in `ddg`.

    `correction`: `pipemare(anneal_steps=1000)` or `spectrain()` of `pt.partition.schedules`, against the delay.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: no bubble, a second forward pass; stage k holds the inputs of K-k batches, and one batch's activations.

    Source: Z. Huo et al., "Training neural networks using features replay", 2018. Deviation: the authors' code draws
    new dropout masks, and updates running statistics twice.
    """
    schedule = schedules.features_replay(stages, lockstep=lockstep, correction=correction)
    return staged_strategy(features_replay, locals(), schedule, inner or sync_sgd(), brief=("correction",))
