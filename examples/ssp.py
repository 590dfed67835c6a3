"""Bounded staleness: asynchronous, but no worker runs more than so many steps ahead of the slowest.

With bound 0 all wait for all in every step; a few steps of slack already hide a worker's slow moments.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for bound in (0, 3, 10):
    result = pt.run(job, pt.strategies.ssp(bound), workers=2, epochs=4)
    print(f"bound {bound:2}: loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, {result.seconds:.2f} s")
