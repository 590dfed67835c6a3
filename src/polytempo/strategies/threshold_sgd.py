"""Threshold SGD: a worker sends ±τ where its accumulated sum exceeds τ, and keeps the rest."""

from __future__ import annotations

from polytempo.compression import feedback, threshold, through
from polytempo.core import Strategy, call_name


def threshold_sgd(tau: float = 0.05, density: float | None = 0.01, exact_below: int = 1024) -> Strategy:
    """Send an index and a sign for each entry of r + g beyond ±τ; each message moves it by τ.

    v = g/N + r; where |v| > τ, ±τ travels, once; r ← v ∓ τ. In every step each worker takes the τ that about the share
    `density` of the entries of v is over. With density=None it is `tau`, and has to suit the gradients: too small a τ
    and the residuals grow without end, too large a one and nothing happens for long. Tensors of fewer than
    `exact_below` elements travel as they are. With one worker nothing is left out.

    The job `digits` with 4 workers, 15 epochs, medians of three seeds: 95.3 %; with τ fixed at 0.05 it is 96.4 %, with
    τ fixed at 0.001 it is 79.7 %; sync_sgd has 98.1 %.

    Cost: (N-1) · 4 bytes for each entry that is sent, fewer where they are many; memory for one more
    gradient, in float32 where that has 16 bits.

    Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015. There τ is in units
    of the weights' update and workers do not wait for each other; here it is in units of this worker's part of the mean
    gradient, so that it does not depend on the learning rate, and all take part in every step.
    """
    codec = feedback(threshold(tau=tau, density=density))
    return Strategy(
        call_name(threshold_sgd, locals()),
        gradients=through(codec, exact_below=exact_below),
    )
