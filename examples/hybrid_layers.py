"""Convolutions by data parallelism, wide layers by model parallelism: each layer by the way that sends less.

    python examples/hybrid_layers.py
    torchrun --standalone --nproc-per-node 2 examples/hybrid_layers.py

With two workers each has half of the wide layer's weights, sees half of each batch, and gets the gradients of one
worker that sees all of it.
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt

world = pt.init()
torch.manual_seed(0)
digits = pt.data.digits()
net = nn.Sequential(
    *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    *(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)),
)
plan = pt.training.plan_layers(net, digits.train.tensors[0][:2], workers=world.size, link="1gbit", batch_size=64)
if world.rank == 0:
    for layer in plan.layers:
        print(f"layer {layer.volume.name}: |W| {layer.data_bytes:,} bytes, |D| {layer.model_bytes:,.0f}: {layer.way}")
model = pt.hybrid(net, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pt.attach(model, optimizer, pt.strategies.sync_sgd())
for epoch in range(3):
    for images, labels in pt.shard(digits.train, batch_size=64 // world.size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = digits.test.tensors
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    held = sum(parameter.numel() for parameter in model.parameters())
    if world.rank == 0:
        print(f"epoch {epoch + 1}: {right:.1%} of the test digits, {world.size} worker(s), {held} parameters on rank 0")
