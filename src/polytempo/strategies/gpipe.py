"""GPipe: all micro-batches forward through the stages of a model, then all back, then one update."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def gpipe(
    stages: int = 2,
    micro_batches: int = 4,
    recompute: bool = True,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Cut a batch into micro-batches, which go forward through all stages, and then back; update when all are back.

    g = Σₘ (nₘ/n) gₘ over M micro-batches, at one version of the parameters: the same as one worker. No delay. With
    `recompute` a stage keeps a micro-batch's inputs only, and computes its activations again on the way back.

    `activations` and `gradients`: codecs for tensors from stage to stage, and for their gradients back.

    `workers` is a multiple of `stages`: worker r is stage r mod K of replica r // K. `inner` (default: `sync_sgd()`)
    exchanges gradients between replicas of a stage. `pt.pipeline` takes it for a loop of one's own. With an `inner`
    that has a parameter server each stage has its own, and worker r is stage r // D of replica r mod D, of D replicas.

    Cost: a bubble of (K-1)/(M+K-1) of the time; a stage holds M micro-batches. Each tensor at a cut is sent once
    forward, its gradient once back.

    Source: Y. Huang et al., "GPipe: efficient training of giant neural networks", 2019.
    """
    schedule = schedules.gpipe(stages, micro_batches, recompute=recompute)
    return staged_strategy(gpipe, locals(), schedule, inner or sync_sgd())
