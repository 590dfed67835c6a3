"""ACCO: no gradient is late, though the network works behind the computation.

Each step's gradients travel during the next step, which computes at an estimate of the update. So two steps of half the
batch take the time of computing alone, and the rate need not shrink as with `delayed_sgd`.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

slow = pt.cluster.ethernet(gbit_per_s=1, latency_us=100, gflops=1)
print("                                                ms for 64 samples   loss with lr 0.02   with lr 0.2")
for strategy, batch_size in (
    (pt.strategies.sync_sgd(), 64),
    (pt.strategies.delayed_sgd(delay=1), 64),
    (pt.strategies.acco(), 32),
):
    careful, bold = (
        pt.simulate(job, strategy, workers=4, cluster=slow, batch_size=batch_size, lr=lr, steps=80 * 64 // batch_size)
        for lr in (0.02, 0.2)
    )
    name = f"{strategy}, batches of {batch_size}"
    print(f"{name:47}{1000 * careful.seconds / 80:19.2f}   {careful.loss:17.3f}   {bold.loss:11.3f}")
