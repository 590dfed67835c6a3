"""Byzantine-robust SGD: one worker of seven sends wrong gradients, and the model learns all the same.

The liar is a transform of two lines, chained in front of each strategy's own: transforms are pairs of plain
functions, so attacks, clipping or logging compose with any strategy.
"""

from __future__ import annotations

from dataclasses import replace

import polytempo as pt
from polytempo.aggregation import krum, median, trimmed_mean
from polytempo.core import chain, stateless
from polytempo.jobs.digits import job


async def lie(port: pt.core.Port, bundle: pt.core.Bundle) -> pt.core.Bundle:
    """Rank 3 turns its gradient around and makes it large; the others tell the truth."""
    return bundle.map(lambda flat: -20 * flat) if port.rank == 3 else bundle


for honest in (
    pt.strategies.sync_sgd(),
    pt.strategies.robust_sgd(median),
    pt.strategies.robust_sgd(trimmed_mean(cut=1)),
    pt.strategies.robust_sgd(krum(wrong=1)),
):
    attacked = replace(honest, gradients=chain(stateless(lie), honest.gradients))
    result = pt.simulate(job, attacked, workers=7, batch_size=16, lr=0.05, steps=60)
    verdict = "" if (result.accuracy or 0) > 0.5 else "   <- steered by the liar"
    print(f"{honest!s:38} accuracy {result.accuracy:6.1%}{verdict}")
