"""Layers on several workers: each has some of the hidden features, and all take the same batches.

With one worker it is plain back-propagation; with two each has half of both layers, and computes the same as one
worker:

    python examples/split_layers.py
    torchrun --standalone --nproc-per-node 2 examples/split_layers.py

`pt.init(mesh={"data": 2, "model": 2})` on four workers would train two such models on different batches.
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt

world = pt.init()
pt.init(mesh={"data": 1, "model": world.size})
torch.manual_seed(0)
digits = pt.data.digits()
model = pt.split(
    nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)),
    {"0": "column", "2": "column", "3": "row"},
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
pt.attach(model, optimizer, pt.strategies.sync_sgd())
for epoch in range(4):
    for images, labels in pt.shard(digits.train, batch_size=32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = digits.test.tensors
    with torch.no_grad():
        right = (model.eval()(images).argmax(dim=1) == labels).float().mean()
    model.train()
    held = sum(parameter.numel() for parameter in model.parameters())
    if world.rank == 0:
        print(f"epoch {epoch + 1}: {right:.1%} of the test digits, {world.size} part(s), {held} parameters on rank 0")
