"""A model in two stages, by every schedule: schedules that wait compute the same as one worker, the others are faster.

Virtual time on two hosts at 100 Gbit/s; accuracies are real.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from polytempo import cluster, simulate, strategies
from polytempo.jobs import digits


def model() -> nn.Module:
    """Layers that two stages can share evenly."""
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


COMPARED = [
    strategies.sync_sgd(),  # of one worker
    strategies.gpipe(stages=2, micro_batches=4),
    strategies.one_f_one_b(stages=2, micro_batches=4),
    strategies.interleaved(stages=2, micro_batches=4, parts=2),
    strategies.zero_bubble(stages=2, micro_batches=4),
    strategies.ddg(stages=2),
    strategies.features_replay(stages=2),
    strategies.pipelined_backprop(stages=2),
    strategies.pipedream(stages=2, vertical_sync=True),
    strategies.pipedream_2bw(stages=2, micro_batches=4),
]

network = cluster.ethernet(gbit_per_s=100, latency_us=5, gflops=1)
job = replace(digits.job, model=model)
for strategy in COMPARED:
    result = simulate(job, strategy, workers=strategy.stages, cluster=network, epochs=2, lr=0.05)
    milliseconds = 1000 * result.seconds
    print(f"{strategy!s:60} {milliseconds:6.2f} ms, {result.accuracy:.1%} of the test digits")
