"""A job with layers in parts: every worker has a part of each layer, or divides some layers with other samples.

Virtual time of four workers at 100 Gbit/s; accuracies are real, and equal one worker's with the same batches.
"""

from __future__ import annotations

from polytempo import cluster, simulate, strategies
from polytempo.jobs import digits

COMPARED = [
    strategies.sync_sgd(),
    strategies.split({"0": "column", "2": "row"}, parts=2),  # two models; two workers hold each together
    strategies.split(parts=4, inner=strategies.local_sgd(period=8)),  # one model, in parts that send the least
    strategies.hybrid(["2"]),  # the output layer divided over all, the other one whole on each
]

network = cluster.ethernet(gbit_per_s=100, latency_us=5, gflops=1)
for strategy in COMPARED:
    result = simulate(digits.job, strategy, workers=4, cluster=network, global_batch_size=32, epochs=3)
    print(f"{strategy!s:90} {result.accuracy:.1%} in {result.seconds:.3f} virtual s")
