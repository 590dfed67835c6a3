"""PipeDream-2BW: two versions of the parameters, and gradients of a batch one update late."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def pipedream_2bw(
    stages: int = 2,
    micro_batches: int = 4,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """1F1B over batches that follow each other without a bubble, each at the parameters before the last update.

    w(t+1) = w(t) - ν ∇f(w(t-1)): one update late on all stages, and not at all with one stage

    A batch is cut into `micro_batches`, at least `stages` - 1 of them.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: no bubble; stage k holds K-k micro-batches, and two versions of its parameters.

    Source: D. Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021.
    """
    schedule = schedules.pipedream_2bw(stages, micro_batches)
    return staged_strategy(pipedream_2bw, locals(), schedule, inner or sync_sgd())
