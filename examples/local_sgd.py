"""Local SGD: the longer workers go alone, the less they talk, until they drift apart.

Eight sites on the internet, 100 Mbit/s and 20 ms from each other, see the same number of samples with
periods from 1 (the mean after every step) to 16. Watch the virtual time fall as 1/H, and the loss pay for it.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

sites = pt.cluster.internet(mbit_per_s=100, latency_ms=20)
for period in (1, 2, 4, 8, 16):
    strategy = pt.strategies.local_sgd(period)
    result = pt.simulate(job, strategy, workers=8, cluster=sites, batch_size=16, lr=0.05, steps=96)
    bar = "#" * round(result.seconds * 2)
    print(f"period {period:2}: loss {result.loss:.3f}, accuracy {result.accuracy:.1%}, {result.seconds:5.1f} s {bar}")
