"""A model in stages with split layers: a stage is held by two workers, each with half of every layer.

python examples/pipeline_split.py                                                    # one stage of whole layers
torchrun --standalone --nproc-per-node 2 examples/pipeline_split.py                  # one stage on two workers
torchrun --standalone --nproc-per-node 4 examples/pipeline_split.py                  # two stages, each on two
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt

world = pt.init()
parts, stages = min(world.size, 2), 2 if world.size > 2 else 1
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Sequential(
    *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU()),
    *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
)
split = pt.strategies.split({"0": "column", "2": "row", "4": "column", "6": "row"}, parts)
pipe = pt.pipeline(
    model,
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    nn.functional.cross_entropy,
    pt.strategies.one_f_one_b(stages, micro_batches=4, inner=split),
    sample=digits.train.tensors[0][:32],
    by=["4"] if stages == 2 else "operations",  # the second stage begins behind a row layer: its input is whole
)
for epoch in range(4):
    order = torch.randperm(len(digits.train), generator=torch.Generator().manual_seed(epoch))
    for chosen in order.split(32):  # all workers take the same batches
        images, labels = digits.train[chosen]
        pipe.step(images, labels)
    model.load_state_dict(pipe.state_dict())
    images, labels = digits.test.tensors
    right = (model(images).argmax(dim=1) == labels).float().mean()
    held = sum(parameter.numel() for parameter in pipe.model.parameters())
    if world.rank == 0:
        print(f"epoch {epoch + 1}: {right:.1%} of the test digits, {world.size} worker(s), {held} parameters on rank 0")
pipe.finish()
