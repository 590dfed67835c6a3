"""Pipelined back-propagation: batches stream through the layers, and parameters are used as they are."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.schedules import Correction
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def pipelined_backprop(
    stages: int = 2,
    correction: Correction | None = None,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Run `ddg(weights="current")` with one more step between stages, so that a message may take as long as a batch.

    w(k) ← w(k) - γ g(t - d(k)),    d(k) = 2(K-1-k) steps late at stage k of K

    `correction`: `pipemare(anneal_steps=1000)` or `spectrain()` of `pt.partition.schedules`, against the delay.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`.

    Cost: no bubble; stage k holds 2(K-k)-1 batches, and one version of its parameters.

    Source: X. Chen et al., "Pipelined back-propagation for context-dependent deep neural networks", 2012.
    """
    schedule = schedules.pipelined_backprop(stages, correction=correction)
    return staged_strategy(pipelined_backprop, locals(), schedule, inner or sync_sgd(), brief=("correction",))
