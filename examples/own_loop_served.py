"""Your own training loop with its parameters at a server: any strategy that has one, under torchrun or alone.

`pt.attach` starts the server's processes beside rank 0, and `pt.shard` deals the batches: a worker that is free gets
the next one, and each is used once. After an epoch every worker's model is the server's. `easgd` alone leaves workers
their own models, so `consensus` lends the evaluated one:

    python examples/own_loop_served.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop_served.py 'easgd(period=4)'
    torchrun --standalone --nproc-per-node 3 examples/own_loop_served.py 'ssp(bound=2, shards=2)'

With `--servers N` so many of the launcher's processes hold the shards and do not train:

    torchrun --standalone --nproc-per-node 4 examples/own_loop_served.py --servers 2
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import polytempo as pt

EPOCHS = 5

parser = argparse.ArgumentParser()
parser.add_argument("strategy", nargs="?", default="downpour(shards=2, replicas=1, lr=0.02)")
parser.add_argument("--servers", type=int, default=0)
arguments = parser.parse_args()

strategy = pt.parse_strategy(arguments.strategy)
world = pt.init(servers=arguments.servers)  # returns in workers alone
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

handle = pt.attach(model, optimizer, strategy)
batches = pt.shard(digits.train, batch_size=32)
for _ in range(EPOCHS):
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
with handle.consensus():
    images, labels = digits.test.tensors
    right = (model(images).argmax(dim=1) == labels).float().mean()
if world.rank == 0:
    print(f"{strategy}: {right:.1%} of the test digits, {world.size} worker(s), {handle.step} steps of worker 0")
handle.detach()
if isinstance(handle, pt.training.ServedHandle) and handle.account is not None:
    print(f"samples: {handle.account['ledger']}; staleness: {handle.account['staleness']['mean']:.2f}")
