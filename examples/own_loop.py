"""Your own training loop, made distributed by three lines.

`pt.init` joins the world that torchrun (or Slurm, Open MPI, Ray) has set up, `pt.attach` hangs the strategy
on the optimizer, `pt.shard` deals the samples to the workers. The loop itself does not change. Between two meetings
of `local_sgd` every worker has a model of its own; the score is of their mean, which `consensus` lends:

    python examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt

world = pt.init()
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

handle = pt.attach(model, optimizer, pt.strategies.local_sgd(period=8))
batches = pt.shard(digits.train, batch_size=32)
for epoch in range(6):
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    with handle.consensus():
        images, labels = digits.test.tensors
        right = (model(images).argmax(dim=1) == labels).float().mean()
    if world.rank == 0:
        print(f"epoch {epoch + 1}, step {handle.step}: {right:.1%} of the test digits, {world.size} worker(s)")
