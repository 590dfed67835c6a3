"""Elastic training in Horovod's style: processes may be killed, leave and join; only the import is another.

    python examples/horovod_elastic.py
    polytempo horovodrun -np 3 --min-np 2 --max-np 4 --blacklist-cooldown-range 1 60 python examples/horovod_elastic.py

Kill one of the processes while it runs: the others go on from the last commit, without a new start, and another one
takes its place. `state.used` counts how often each sample was used: once an epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polytempo as pt
import polytempo.horovod.torch as hvd  # was: import horovod.torch as hvd

EPOCHS, BATCH = 4, 24

hvd.init()
torch.manual_seed(42)
digits = pt.data.digits()
samples = len(digits.train)
data = TensorDataset(*digits.train.tensors, torch.arange(samples))
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    """Train from where the state is."""
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - as Horovod's documentation has it
        for number, (images, labels, which) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            mine = torch.zeros(samples, dtype=torch.int64)
            mine[which] = 1
            state.used = (torch.tensor(state.used) + hvd.allreduce(mine, op=hvd.Sum, name="used")).tolist()
            sampler.record_batch(number, BATCH)
            state.commit()
        sampler.set_epoch(state.epoch + 1)


def follow_the_group() -> None:
    """The learning rate stays proportional to the number of processes."""
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * hvd.size()


state: Any = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, used=[0] * samples)
state.register_reset_callbacks([follow_the_group])
train(state)
if hvd.rank() == 0:
    images, labels = digits.test.tensors
    accuracy = (model(images).argmax(dim=1) == labels).float().mean()
    times = f"{min(state.used)} to {max(state.used)}"
    print(
        f"{accuracy:.1%} of the test digits, each sample used {times} times in {EPOCHS} epochs, {hvd.size()} worker(s)"
    )
