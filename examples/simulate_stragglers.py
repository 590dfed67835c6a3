"""Stragglers under the virtual clock: who waits for whom, on a cluster that you do not have.

Thirty-two workers with varying steps, and now and then one takes five times as long. A synchronous step lasts as long
as its slowest worker's; local steps average the delays out, and neighbours wait only for neighbours. Same seed, same
run, to the bit: the last line makes one of the runs twice and compares the traces.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.cluster import constant, exponential, lognormal, occasional
from polytempo.jobs.digits import job
from polytempo.strategies import gossip, local_sgd, sync_sgd


def simulated(strategy: pt.Strategy, stragglers: pt.cluster.Stragglers) -> pt.Result:
    """10 steps on 32 workers; only the variation of the computing time is different."""
    cluster = pt.cluster.ethernet(gbit_per_s=10, gflops=0.2, stragglers=stragglers)
    return pt.simulate(job, strategy, workers=32, cluster=cluster, batch_size=4, steps=10)


kinds = {"constant": constant(), "lognormal": lognormal(0.3), "2 % take 5x": occasional(), "exponential": exponential()}
print("virtual ms for 10 steps            " + "".join(f"{name:>14}" for name in kinds))
for strategy in (sync_sgd(), local_sgd(period=5), gossip()):
    times = [1000 * simulated(strategy, stragglers).seconds for stragglers in kinds.values()]
    print(f"{strategy!s:35}" + "".join(f"{ms:14.1f}" for ms in times))
again = [simulated(sync_sgd(), lognormal(0.3)).trace_hash for _ in range(2)]
print(f"the same run twice: {'equal' if again[0] == again[1] else 'different'} traces")
