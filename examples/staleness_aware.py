"""Staleness-aware SGD: the later a gradient is, the less it counts.

Four workers push as they like, so a gradient is about three updates old when it arrives. A learning rate that one
worker just bears is too much for such gradients, unless each is divided by its own staleness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Plain, so that nothing else remembers old gradients."""
    return torch.optim.SGD(parameters, lr=lr)


plain = replace(job, optimizer=sgd)
for strategy in (pt.strategies.async_sgd(rate=1), pt.strategies.staleness_aware()):
    result = pt.run(plain, strategy, workers=4, epochs=4, lr=0.5)
    print(f"{strategy!s:48} loss {result.loss:.4f}, accuracy {result.accuracy:.1%}")
