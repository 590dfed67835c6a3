"""One model in float32, bfloat16 and float16: accuracy, and the bytes of weights that forward and backward see.

python examples/reduced_precision.py
torchrun --standalone --nproc-per-node 2 examples/reduced_precision.py
"""

from __future__ import annotations

import torch
from torch import nn

import polytempo as pt

PRECISIONS = (None, pt.precision("bf16"), pt.precision("fp16", loss_scale="dynamic"))

world = pt.init()
digits = pt.data.digits()
images, labels = digits.test.tensors
for precision in PRECISIONS:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = pt.attach(model, optimizer, precision=precision)
    for _ in range(3):
        for x, y in pt.shard(digits.train, batch_size=64 // world.size):
            optimizer.zero_grad()
            handle.scaled(nn.functional.cross_entropy(model(x), y)).backward()  # without fp16: the loss itself
            handle.clip_grad_norm_(5.0)
            optimizer.step()
    held = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    handle.detach()  # a float32 model again
    if world.rank == 0:
        print(f"{precision or 'float32'}: {right:.1%} of the test digits with {held:,} bytes of weights")
