"""A slow worker, by name, and the bound of the run.

Eight workers wait for each other at every step, and the one on host 5 computes 60 % longer. The run names it, and ends
with the sentence about its bound. With balance="speed" that worker has fewer samples of each batch, and no worker waits
for it. The same job on a network of 100 Mbit/s is bound by something else.
"""

from __future__ import annotations

from typing import Literal

import polytempo as pt
from polytempo.cluster import Cluster, constant, slow_host, uniform
from polytempo.jobs.digits import job

slow_worker = pt.cluster.ethernet(gbit_per_s=10, gflops=0.05, stragglers=slow_host(5, 1.6, uniform(0.05)))
slow_network = pt.cluster.ethernet(gbit_per_s=0.1, gflops=0.05, stragglers=constant())

runs: list[tuple[str, Cluster, Literal["equal", "speed"]]] = [
    ("a slow host", slow_worker, "equal"),
    ("a slow host, batches by speed", slow_worker, "speed"),
    ("a slow network", slow_network, "equal"),
]
for title, cluster, balance in runs:
    result = pt.simulate(
        job, pt.strategies.sync_sgd(), workers=8, cluster=cluster, steps=40, batch_size=16, balance=balance
    )
    print(f"{title}, {result.seconds:.2f} virtual s")
    for each in result.diagnoses or []:
        print(f"  {each['text']}")
    print(f"  {result.bound['text'] if result.bound else ''}")
