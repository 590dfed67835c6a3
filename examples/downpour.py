"""Downpour SGD: workers make steps of their own and talk to the server every few steps, in the background.

Adagrad in the server's shards keeps it together: parameters that move much get small steps. The less the
workers talk, the further they are from each other when they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The local step, plain as in the paper."""
    return torch.optim.SGD(parameters, lr=lr)


plain = replace(job, optimizer=sgd)
for every in (1, 5, 20):
    strategy = pt.strategies.downpour(push_every=every, pull_every=every, shards=2, lr=0.02)
    result = pt.run(plain, strategy, workers=2, epochs=4, lr=0.02)
    print(f"every {every:2} steps: loss {result.loss:.4f}, accuracy {result.accuracy:.1%}")
