"""A network of pictures on several workers, each with some places: DistBelief's figure, with halos between neighbours.

Virtual time of a step on a batch of 8, without values, on machines of 40 Gflop/s and links of 1 Gbit/s and 100 us. The
network has three layers of 18 x 18 places and 8 channels on pictures of 200 x 200, as the locally connected networks of
Q. Le et al., 2012, which DistBelief trained.

sums     convolutions: gradients of weights are summed over all places
stays    a first layer of one place is trained alone, and other weights are fixed: halos travel in both directions, and
         no weights, as in a locally connected network, where a place has weights of its own; their gradients are not
         charged, for one machine as for many
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from polytempo import Data, Job, cluster, simulate, strategies


def network(*, stays: bool) -> nn.Module:
    """Three layers with means of 5 x 5 places behind each, and ten classes."""
    layers = [nn.Sequential(nn.Conv2d(channels, 8, 18), nn.ReLU(), nn.AvgPool2d(5, 1)) for channels in (3, 8, 8)]
    features = nn.Sequential(nn.Conv2d(3, 3, 1), *layers)
    for layer in layers:
        layer.requires_grad_(not stays)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def pictures(folder: object) -> Data:
    """Pictures without a meaning: only their sizes count."""
    return Data(TensorDataset(torch.zeros(8, 3, 200, 200), torch.zeros(8, dtype=torch.long)))


def seconds(workers: int, *, stays: bool) -> float:
    """Virtual seconds of a step."""
    job = Job(
        model=partial(network, stays=stays),
        data=pictures,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr),
        batch_size=8,
        name="pictures",
    )
    machines = cluster.ethernet(gbit_per_s=1, latency_us=100, gflops=40)
    strategy = strategies.split({"0": "places"}, parts=workers) if workers > 1 else strategies.sync_sgd()
    return simulate(job, strategy, workers=workers, cluster=machines, steps=1, threads=1, meta=True).seconds


for stays in (True, False):
    name, alone = "stays" if stays else "sums", seconds(1, stays=stays)
    for workers in (4, 16, 81):
        took = seconds(workers, stays=stays)
        print(f"{name:6} {workers:3} workers  {1e3 * took:5.0f} virtual ms  {alone / took:5.1f} times as fast")
