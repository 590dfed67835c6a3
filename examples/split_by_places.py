"""A network of pictures on several workers, each with some places: DistBelief's figure, with halos between neighbours.

Virtual time of a step on a batch of 8, without values, on machines of 40 Gflop/s and links of 1 Gbit/s and 100 us. The
network has three layers of 18 x 18 places and 8 channels on pictures of 200 x 200, as the locally connected networks of
Q. Le et al., 2012, which DistBelief trained.

shared   convolutions: gradients of weights are summed over all places
own      a place has weights of its own, 1.2 billion in all: halos travel, and no weights
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from polytempo import Data, Job, cluster, simulate, strategies
from polytempo.partition.tensor import LocallyConnected2d


def network(*, own: bool) -> nn.Module:
    """Three layers with means of 5 x 5 places behind each, and ten classes."""
    layers, size, channels = [], 200, 3
    for _ in range(3):
        layer = LocallyConnected2d(channels, 8, size, 18) if own else nn.Conv2d(channels, 8, 18)
        layers += [layer, nn.ReLU(), nn.AvgPool2d(5, 1)]
        size, channels = size - 17 - 4, 8
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def pictures(folder: object) -> Data:
    """Pictures without a meaning: only their sizes count."""
    return Data(TensorDataset(torch.zeros(8, 3, 200, 200), torch.zeros(8, dtype=torch.long)))


def seconds(workers: int, *, own: bool) -> float:
    """Virtual seconds of a step."""
    job = Job(
        model=partial(network, own=own),
        data=pictures,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=8,
        name="pictures",
    )
    machines = cluster.ethernet(gbit_per_s=1, latency_us=100, gflops=40)
    strategy = strategies.split({"0": "places"}, parts=workers) if workers > 1 else strategies.sync_sgd()
    return simulate(job, strategy, workers=workers, cluster=machines, steps=1, threads=1, meta=True).seconds


for own in (True, False):
    name, alone = "own" if own else "shared", seconds(1, own=own)
    for workers in (4, 16, 81):
        took = seconds(workers, own=own)
        print(f"{name:6} {workers:3} workers  {1e3 * took:5.0f} virtual ms  {alone / took:5.1f} times as fast")
