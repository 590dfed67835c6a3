"""Stochastic gradient push: on a directed graph numbers drift apart in weight, and still all find the mean.

Sixteen ranks hold the numbers 0 to 15. In each round each sends a half of its own to another, drawn at random: some
hear of several, some of none. `push_sum`, the transform of `pt.strategies.stochastic_gradient_push`, divides by weight.
"""

from __future__ import annotations

import torch

import polytempo as pt
from polytempo.aggregation import push_sum, random_targets

RANKS, ROUNDS = 16, 24


async def program(port: pt.core.Port) -> list[float]:
    """This rank's number after each round."""
    transform = push_sum(random_targets(seed=0))
    bundle = pt.core.Bundle({"x": torch.tensor([float(port.rank)])})
    state, seen = transform.init(bundle), [float(port.rank)]
    for _ in range(ROUNDS):
        answer, state = await transform.apply(port, bundle, state)
        bundle = answer or bundle
        seen.append(float(bundle.flat))
    return seen


outcome = pt.worlds.VirtualWorld(pt.cluster.ethernet(), RANKS).run(program)
for number, values in enumerate(zip(*outcome.results, strict=True)):
    if number % 4 == 0:
        print(f"after {number:2} rounds from {min(values):6.3f} to {max(values):6.3f}; the mean is 7.5")
