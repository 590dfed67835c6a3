"""Elastic averaging: each worker goes its own way, on a spring to a center at the server, which becomes the model.

The weaker the spring (alpha) and the seldomer it pulls (period), the further the workers explore.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for period, alpha in ((1, 0.45), (4, 0.45), (16, 0.45), (4, 0.1)):
    strategy = pt.strategies.easgd(period, alpha)
    result = pt.run(job, strategy, workers=2, epochs=4)
    print(f"period {period:2}, alpha {alpha:4}: loss {result.loss:.4f}, accuracy {result.accuracy:.1%}")
