"""DiLoCo: the workers' movement in H steps is one gradient for an outer optimizer.

The outer step is Nesterov's. Without it (lr 1, momentum 0) DiLoCo is local SGD, which the first two lines
show; with it the same few exchanges carry the model further. The workers' own optimizer is AdamW, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.strategies import diloco, local_sgd


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The inner optimizer; its state stays with the worker."""
    return torch.optim.AdamW(parameters, lr=lr)


inner = replace(job, optimizer=adamw, lr=2e-4)
for strategy in (
    local_sgd(period=16),
    diloco(period=16, outer_lr=1.0, outer_momentum=0.0),
    diloco(period=16, outer_lr=0.7, outer_momentum=0.9),
):
    result = pt.run(inner, strategy, workers=2, steps=160)
    print(f"{strategy!s:70} loss {result.loss:.4f}, accuracy {result.accuracy:.1%}")
