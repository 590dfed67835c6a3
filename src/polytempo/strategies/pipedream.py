"""PipeDream: 1F1B that does not wait at the end of a batch, with weight stashing."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.schedules import Correction
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def pipedream(
    stages: int = 2,
    vertical_sync: bool = False,
    correction: Correction | None = None,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Each batch comes back with the parameters that it went forward with, and makes an update immediately.

    w(t+1) = w(t) - ν ∇f(w₁(t-K+1), …, w_K(t))

    Stage k of K is K-1-k updates late. With `vertical_sync` a batch sees the parameters of one moment at all stages,
    w(t-K+1), and all are K-1 late.

    `correction`: `pipemare(anneal_steps=1000)` or `spectrain()` of `pt.partition.schedules`, against the delay.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: no bubble; stage k holds K-k batches and as many versions of its parameters, with `vertical_sync` K.

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019.
    """
    schedule = schedules.pipedream(stages, vertical_sync=vertical_sync, correction=correction)
    return staged_strategy(pipedream, locals(), schedule, inner or sync_sgd(), brief=("correction",))
