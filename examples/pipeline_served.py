"""Replicas of a cut model that do not wait for each other: each stage of the model has a parameter server of its own.

The first stage of a replica takes a batch, and its other stages get the same one. Each stage pushes its gradients to
its own server, and goes on from the pulled parameters, with the work of the other replicas in them:

    python examples/pipeline_served.py                                                   # one stage, one replica
    torchrun --standalone --nproc-per-node 2 examples/pipeline_served.py                 # two stages
    torchrun --standalone --nproc-per-node 4 examples/pipeline_served.py                 # two replicas of two stages
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt
from polytempo.runs.own_loop.served_pipeline import ServedPipeline

world = pt.init()
stages = min(world.size, 2)
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
pipe = pt.pipeline(
    model,
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    nn.functional.cross_entropy,
    pt.strategies.one_f_one_b(stages, micro_batches=4, inner=pt.strategies.async_sgd()),
    sample=digits.train.tensors[0][:32],
)
assert isinstance(pipe, ServedPipeline)  # its strategy has a server
batches = pt.shard(digits.train, batch_size=32)
for epoch in range(3):
    for images, labels in batches:
        pipe.step(images, labels)  # the first stage answers the loss
    model.load_state_dict(pipe.state_dict())
    images, labels = digits.test.tensors
    right = (model(images).argmax(dim=1) == labels).float().mean()
    if world.rank == 0:
        print(
            f"epoch {epoch + 1}: {right:.1%} of the test digits, {stages} stage(s), {world.size // stages} replica(s)"
        )
pipe.detach()
if pipe.account is not None:  # on rank 0
    print(f"samples: {pipe.account['ledger']}; staleness: {pipe.account['staleness']['mean']:.2f}")
