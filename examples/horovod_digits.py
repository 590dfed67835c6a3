"""A Horovod script, as its documentation teaches them: only the import is another.

Parameters and optimizer begin as rank 0's, `DistributedSampler` deals the samples, `DistributedOptimizer` averages the
gradients, and the accuracy is averaged over the ranks:

    python examples/horovod_digits.py
    torchrun --standalone --nproc-per-node 2 examples/horovod_digits.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import polytempo as pt
import polytempo.horovod.torch as hvd  # was: import horovod.torch as hvd

hvd.init()
torch.manual_seed(42 + hvd.rank())
digits = pt.data.digits()
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
    digits.train, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = DataLoader(digits.train, batch_size=32 // hvd.size(), sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)

for epoch in range(6):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = (part[hvd.rank() :: hvd.size()] for part in digits.test.tensors)
    accuracy = (model(images).argmax(dim=1) == labels).float().mean()
    accuracy = hvd.allreduce(accuracy, name="accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: {accuracy:.1%} of the test digits, {hvd.size()} worker(s)")
