"""FlexRR: a worker that falls behind hands slices of its batch to workers that are ahead.

Eight virtual workers, one at half speed. Where all wait for it a step takes twice as long; with help it takes little
longer than without stragglers. Each step's gradient is the mean over the same samples, whoever computed them.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.cluster import ethernet, slow_host
from polytempo.jobs.digits import job

for name, cluster in (
    ("all alike", ethernet(gflops=0.01)),
    ("one at half speed", ethernet(gflops=0.01, stragglers=slow_host(7, factor=2.0))),
):
    print(f"\n{name}:")
    for strategy in (pt.strategies.backup_workers(backups=0), pt.strategies.flexrr(grain=0.025)):
        result = pt.simulate(job, strategy, workers=8, cluster=cluster, batch_size=80, steps=10)
        assert result.server is not None
        given = sum(worker.get("slices_given", 0) for worker in result.server["workers"])
        short = strategy.name.partition("(")[0]
        print(f"{short:15} {result.seconds:6.2f} s, loss {result.loss:.4f}, {given} slices given away")
