"""Interleaved 1F1B: each stage holds several parts of the model, which makes the bubble shorter."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def interleaved(
    stages: int = 2,
    micro_batches: int = 4,
    parts: int = 2,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """1F1B over V = `parts` parts of the model a stage: part p is at stage p mod K.

    g = Σₘ (nₘ/n) gₘ over M micro-batches, at one version of the parameters: the same as one worker. No delay.
    `micro_batches` is a multiple of `stages`.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: a bubble of (K-1)/(VM+K-1) of the time, for V times the traffic; stage k holds at most K(V+1)-2k-1 parts of
    micro-batches.

    Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    2021.
    """
    schedule = schedules.interleaved(stages, micro_batches, parts)
    return staged_strategy(interleaved, locals(), schedule, inner or sync_sgd())
