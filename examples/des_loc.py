"""DES-LOC: parameters, momenta and second moments of Adam are averaged, each at a time of its own.

A second moment changes over a thousand steps, so it may wait longer than a momentum, and that longer than parameters.
The loss hardly differs; the bytes do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.strategies import des_loc, local_sgd, parameter_averaging


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam in place of the job's momentum."""
    return torch.optim.Adam(parameters, lr=lr)


with_adam = replace(job, optimizer=adam, lr=0.003)
for strategy in (
    parameter_averaging(period=4),
    des_loc(period=4, momentum_period=12, variance_period=24),
    local_sgd(4),
):
    result = pt.simulate(with_adam, strategy, workers=4, batch_size=16, steps=48)
    sent = result.bytes_sent_per_rank / 1e6
    print(f"{strategy!s:84} loss {result.loss:.3f}, {sent:5.2f} MB sent per worker")
