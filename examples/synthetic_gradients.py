"""Stages that wait for nothing: each updates by an estimate of its output's gradient, and learns to estimate.

With labels (cDNI) the estimates are good, without them (DNI) they are less so. The two stages are two
workers of a virtual world; their computations are real.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from polytempo import simulate, strategies
from polytempo.jobs.digits import job

COMPARED = {
    "one worker": strategies.sync_sgd(),
    "gradients that are one update late": strategies.ddg(stages=2),
    "estimates with labels": strategies.synthetic_gradients(stages=2, classes=10, lr=0.003),
    "estimates without labels": strategies.synthetic_gradients(stages=2, lr=0.003),
}

by_adam = replace(job, optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr))
for name, strategy in COMPARED.items():
    result = simulate(by_adam, strategy, workers=strategy.stages, epochs=8, lr=0.001)
    print(f"{name:36} {result.accuracy:.1%} of the test digits")
