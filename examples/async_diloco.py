"""Asynchronous DiLoCo: one worker is four times slower, and no other waits for it.

By the rate of synchronous DiLoCo the server makes 1/N of its step for each of N movements. The fourth line has a whole
step for each: too far. `decoupled_diloco` steps by two movements at a time. By `halos` two regions of two workers have
parameters of their own. The first line is `diloco`, where all wait for the slow worker in each round.
"""

from __future__ import annotations

from dataclasses import replace

import polytempo as pt
from polytempo import strategies
from polytempo.jobs.digits import job

cluster = replace(pt.cluster.ethernet(gbit_per_s=1), stragglers=pt.cluster.slow_host(0, 4.0))
for strategy in (
    strategies.diloco(period=10, outer_momentum=0.0),
    strategies.async_diloco(period=10),
    strategies.async_diloco(period=10, scale=pt.power(0.5)),
    strategies.async_diloco(period=10, outer_lr=2.8),
    strategies.decoupled_diloco(period=10, quorum=2),
    strategies.halos(period=10, region=2, every=2, outer_momentum=0.0, global_lr=1.0, global_momentum=0.0),
):
    result = pt.simulate(job, strategy, workers=4, cluster=cluster, batch_size=16, lr=0.05, epochs=2)
    print(f"{strategy!s:90} loss {result.loss:6.3f} in {result.seconds:.3f} virtual s")
