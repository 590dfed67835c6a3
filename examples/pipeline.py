"""A model with layers on several workers: every worker trains its own stage, on all batches.

With one worker it is plain back-propagation; with two or three each has a stage. `ddg` updates a stage by gradients
that come late, so no stage waits for another; write `one_f_one_b(stages=world.size, micro_batches=4)` for a schedule
that waits, and computes the same as one worker:

    python examples/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt
from polytempo.partition.schedules import ddg

world = pt.init()
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Sequential(
    *(nn.Linear(64, 128), nn.ReLU()),
    *(nn.Linear(128, 128), nn.ReLU()),
    *(nn.Linear(128, 64), nn.ReLU()),
    nn.Linear(64, 10),
)
pipe = pt.pipeline(
    model,
    lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    nn.functional.cross_entropy,
    ddg(stages=world.size),
    sample=digits.train.tensors[0][:32],
)
for epoch in range(6):
    order = torch.randperm(len(digits.train), generator=torch.Generator().manual_seed(epoch))
    for chosen in order.split(32):  # all stages take the same batches
        images, labels = digits.train[chosen]
        pipe.step(images, labels)
    model.load_state_dict(pipe.state_dict())
    images, labels = digits.test.tensors
    right = (model(images).argmax(dim=1) == labels).float().mean()
    if world.rank == 0:
        print(f"epoch {epoch + 1}: {right:.1%} of the test digits, {world.size} stage(s), {pipe.delay} step(s) late")
pipe.finish()
