"""Streaming DiLoCo and SparseLoCo: less bandwidth than DiLoCo's, by fragments behind the computation, or by few bits.

Eight workers at sites with 10 Mbit/s and 20 ms between them.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.strategies import diloco, sparse_loco, streaming_diloco

sites = pt.cluster.internet(mbit_per_s=10, latency_ms=20)

for strategy in (
    diloco(period=12),
    streaming_diloco(period=12, fragments=3, delay=3),
    streaming_diloco(period=12, fragments=3, delay=3, blend="keep"),
    sparse_loco(period=12),
):
    result = pt.simulate(job, strategy, workers=8, cluster=sites, batch_size=16, lr=0.05, steps=120)
    print(f"{strategy!s:110} loss {result.loss:.3f}, {result.bytes_sent_per_rank / 1e3:.0f} kB, {result.seconds:.2f} s")
