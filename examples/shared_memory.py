"""One copy of the weights: the workers of a host share parameters and optimizer state instead of copying them.

It is synchronous SGD, only laid out otherwise: the losses below agree to rounding.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for strategy in (pt.strategies.sync_sgd(), pt.strategies.shared_memory()):
    result = pt.run(job, strategy, workers=2, steps=60)
    print(
        f"{strategy!s:24} loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, {result.samples_per_s:,.0f} samples/s"
    )
