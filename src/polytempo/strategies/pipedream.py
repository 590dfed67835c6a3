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

    `activations` and `gradients`: codecs for tensors from stage to stage, and for their gradients back.

    `workers` is a multiple of `stages`: worker r is stage r mod K of replica r // K. `inner` (default: `sync_sgd()`)
    exchanges gradients between replicas of a stage. `pt.pipeline` takes it for a loop of one's own. With an `inner`
    that has a parameter server each stage has its own: see `one_f_one_b`.

    Cost: no bubble; stage k holds K-k batches and as many versions of its parameters, with `vertical_sync` K.

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019.
    """
    schedule = schedules.pipedream(stages, vertical_sync=vertical_sync, correction=correction)
    return staged_strategy(pipedream, locals(), schedule, inner or sync_sgd(), brief=("correction",))
