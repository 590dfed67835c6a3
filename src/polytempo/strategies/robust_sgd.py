"""Byzantine-robust SGD: a minority of wrong gradients cannot steer the model."""

from __future__ import annotations

from polytempo.aggregation import Merge, median, merged, moving_average
from polytempo.core import Strategy, call_name, chain


def robust_sgd(merge: Merge = median, momentum: float = 0.0) -> Strategy:
    """Merge gradients by a rule that outvotes wrong workers, such as `median` or `krum(wrong)`.

    The others are `trimmed_mean(cut)`, `multi_krum(wrong)`, `nearest_to_median(wrong)`, `bulyan(wrong)` and
    `centered_clip(tau)`.
    Every worker gathers all gradients and applies the same rule, so no server has to be trusted. Running statistics
    (batch norm) are merged by the same rule.

    With `momentum` β each worker sends its own average mᵢ ← β mᵢ + (1 - β) gᵢ, and the optimizer steps by the merged
    ones. Averages of right workers differ less than their gradients, by √((1 - β) / (1 + β)), so a wrong worker
    within their spread moves the answer less; without it a small constant error is never outvoted. An optimizer with
    momentum then applies two.

    Cost: (N-1)·K bytes and N·K of memory per worker, with momentum K more. The median of few workers is
    noisier than their mean.

    Source: P. Blanchard et al., "Machine learning with adversaries", 2017; D. Yin et al., "Byzantine-robust
    distributed learning: towards optimal statistical rates", 2018; E. M. El Mhamdi, R. Guerraoui and S. Rouault, "The
    hidden vulnerability of distributed learning in Byzantium", 2018; for momentum, S. P. Karimireddy, L. He and M.
    Jaggi, "Learning from history for Byzantine robust optimization", 2021, and S. Farhadkhani, R. Guerraoui, N. Gupta,
    R. Pinot and J. Stephan, "Byzantine machine learning made easy by resilient averaging of momentums", 2022.
    """
    transform = merged(merge)
    if momentum:
        transform = chain(moving_average(momentum), transform)
    return Strategy(call_name(robust_sgd, locals(), brief=("momentum",)), gradients=transform)
