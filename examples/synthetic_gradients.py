"""Stages that wait for nothing: each updates by an estimate of its output's gradient, and learns to estimate.

With labels (cDNI) the estimates are good, without them (DNI) they are less so. Virtual time on two hosts at 100 Gbit/s;
losses and accuracies are real. `delay` is that of the first stage's updates.
"""

from __future__ import annotations

from polytempo import cluster, simulate, strategies
from polytempo.jobs.digits import job

COMPARED = {
    "one worker": strategies.sync_sgd(),
    "gradients that are one update late": strategies.ddg(stages=2),
    "estimates with labels": strategies.synthetic_gradients(stages=2, classes=10, lr=0.003),
    "estimates without labels": strategies.synthetic_gradients(stages=2, hidden_layers=1, lr=0.003),
}

network = cluster.infiniband(gbit_per_s=100)
for name, strategy in COMPARED.items():
    result = simulate(job, strategy, workers=strategy.stages, cluster=network, epochs=8, lr=0.05)
    print(f"{name:36} {1000 * result.seconds:6.2f} ms, {result.accuracy:.1%} of the test digits")
