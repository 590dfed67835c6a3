"""Byzantine-robust SGD: a minority of wrong gradients cannot steer the model."""

from __future__ import annotations

from polytempo.aggregation import Merge, median, merged
from polytempo.core import Strategy, call_name


def robust_sgd(merge: Merge = median) -> Strategy:
    """Merge gradients by a rule that outvotes wrong workers, such as `median` or `krum(wrong)`.

    The others are `trimmed_mean(cut)`, `multi_krum(wrong)`, `nearest_to_median(wrong)` and `bulyan(wrong)`.
    Every worker gathers all gradients and applies the same rule, so no server has to be trusted. Running statistics
    (batch norm) are merged by the same rule.

    Cost: (N-1)·K bytes and N·K of memory per worker. The median of few workers is noisier than their mean.

    Source: P. Blanchard et al., "Machine learning with adversaries", 2017; D. Yin et al., "Byzantine-robust
    distributed learning: towards optimal statistical rates", 2018; E. M. El Mhamdi, R. Guerraoui and S. Rouault, "The
    hidden vulnerability of distributed learning in Byzantium", 2018.
    """
    return Strategy(call_name(robust_sgd, locals(), brief=()), gradients=merged(merge))
