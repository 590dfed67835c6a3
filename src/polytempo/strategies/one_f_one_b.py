"""1F1B: one micro-batch back for each that goes forward, and one update a batch."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def one_f_one_b(
    stages: int = 2,
    micro_batches: int = 4,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Run `gpipe` with micro-batches that come back as soon as they can, so that a stage holds fewer of them.

    g = Σₘ (nₘ/n) gₘ over M micro-batches, at one version of the parameters: the same as one worker. No delay.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: a bubble of (K-1)/(M+K-1) of the time; stage k holds min(K-k, M) micro-batches.

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019; with one update a
    batch: "Memory-efficient pipeline-parallel DNN training", 2021.
    """
    schedule = schedules.one_f_one_b(stages, micro_batches)
    return staged_strategy(one_f_one_b, locals(), schedule, inner or sync_sgd())
