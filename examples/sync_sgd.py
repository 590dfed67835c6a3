"""Synchronous SGD: the gradient of the joined batch, by any route.

A route chooses the paths of the sum. It changes the time and each rank's bytes, never the
model: the losses below agree. All routes send the same number of bytes in total (the last column is the mean
over workers); the clock tells them apart by how much passes the busiest link. A star, the single parameter
server, sends everything through one; a ring spreads it over all.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.collectives import halving_doubling, hierarchical, ring, star, tree
from polytempo.jobs.digits import job

cluster = pt.cluster.ethernet(gbit_per_s=1, workers_per_host=4)
print("16 workers on 4 hosts with 1 Gbit/s          loss   ms a step   sent per worker")
for route in (star, tree, ring, halving_doubling, hierarchical(between=ring)):
    strategy = pt.strategies.sync_sgd(route)
    result = pt.simulate(job, strategy, workers=16, cluster=cluster, batch_size=8, steps=20)
    step_ms, sent_kb = 1000 * result.seconds / result.steps, result.bytes_sent_per_rank / result.steps / 1000
    print(f"{strategy!s:43}{result.loss:.4f}   {step_ms:9.2f}   {sent_kb:6.1f} kB a step")
