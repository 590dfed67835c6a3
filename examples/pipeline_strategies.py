"""A model in two stages, by every schedule: what waits computes what one worker does, what does not wait is faster.

Virtual time on two hosts at 100 Gbit/s; losses and accuracies are real.
"""

from __future__ import annotations

from polytempo import cluster, simulate, strategies
from polytempo.jobs.digits import job

COMPARED = [
    strategies.sync_sgd(),  # of one worker
    strategies.gpipe(stages=2, micro_batches=4),
    strategies.one_f_one_b(stages=2, micro_batches=4),
    strategies.interleaved(stages=2, micro_batches=4, parts=1),
    strategies.zero_bubble(stages=2, micro_batches=4),
    strategies.ddg(stages=2),
    strategies.features_replay(stages=2),
    strategies.pipelined_backprop(stages=2),
    strategies.pipedream(stages=2, vertical_sync=True),
    strategies.pipedream_2bw(stages=2, micro_batches=4),
]

network = cluster.infiniband(gbit_per_s=100)
for strategy in COMPARED:
    result = simulate(job, strategy, workers=strategy.stages, cluster=network, epochs=2, lr=0.05)
    milliseconds = 1000 * result.seconds
    print(f"{strategy!s:60} {milliseconds:6.2f} ms, {result.accuracy:.1%} of the test digits")
