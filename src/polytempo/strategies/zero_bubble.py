"""ZB-H1: 1F1B with gradients of weights that fill the bubble."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def zero_bubble(
    stages: int = 2,
    micro_batches: int = 4,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Run 1F1B with the backward pass cut in two: first the gradient for the stage before, later the weights'.

    g = Σₘ (nₘ/n) gₘ over M micro-batches, at one version of the parameters: the same as one worker. No delay.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: a third of 1F1B's bubble where both halves take as long as a forward pass; a stage holds K micro-batches.

    Source: P. Qi et al., "Zero bubble pipeline parallelism", 2023. Deviation: the optimizer step waits for all
    gradients; the paper's validation of steps after the fact is left out.
    """
    schedule = schedules.zero_bubble(stages, micro_batches)
    return staged_strategy(zero_bubble, locals(), schedule, inner or sync_sgd())
