"""Parameter averaging: train alone, average the models now and then. And the optimizer's memory?

With Adam each worker also has moments, m and v. Averaging them too (as DL4J does) keeps the workers'
optimizers alike, and triples the bytes. With plain SGD or momentum and period 1, averaging the models is
synchronous SGD; with Adam it is not, because Adam's step is not linear in the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.strategies import parameter_averaging, sync_sgd


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam in place of the job's momentum."""
    return torch.optim.Adam(parameters, lr=lr)


with_adam = replace(job, optimizer=adam, lr=0.003, epochs=4)
for strategy in (
    sync_sgd(),
    parameter_averaging(period=1, optimizer_state=True),
    parameter_averaging(period=10, optimizer_state=True),
    parameter_averaging(period=10, optimizer_state=False),
):
    result = pt.run(with_adam, strategy, workers=2)
    sent_mb = result.bytes_sent_per_rank / 1e6
    print(f"{strategy!s:69} accuracy {result.accuracy:.1%}, {sent_mb:5.2f} MB sent per worker")
