"""Adasum: add orthogonal gradients, average parallel ones.

Two gradients that agree say the same thing twice, so their mean is enough; two that are orthogonal say two
things, so their sum is right. That is why the learning rate need not be scaled with the number of workers.
"""

from __future__ import annotations

import math

import torch

import polytempo as pt
from polytempo.aggregation import adaptive_sum
from polytempo.jobs.digits import job

east = torch.tensor([1.0, 0.0])
for degrees in (0, 30, 60, 90):
    other = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])
    merged = adaptive_sum(east, other)
    print(f"{degrees:3} degrees apart: |mean| {((east + other) / 2).norm():.2f}, |adasum| {merged.norm():.2f}")

print("\ndigits, learning rate 0.01, 60 steps for any number of workers:")
for workers in (1, 2, 4, 8):
    losses = []
    for strategy in (pt.strategies.sync_sgd(), pt.strategies.adasum()):
        result = pt.simulate(job, strategy, workers=workers, batch_size=16, lr=0.01, steps=60)
        losses.append(f"{strategy.name.partition('(')[0]} {result.loss:.3f}")
    print(f"{workers} worker(s): loss with " + ", with ".join(losses))
