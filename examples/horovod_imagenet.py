"""A script in the style of Horovod's ImageNet example, on synthetic images: only the import is another.

The learning rate grows with the number of ranks and warms up, gradients of two passes become one, travel as fp16, and
loss and accuracy are averaged over the ranks:

    python examples/horovod_imagenet.py
    polytempo horovodrun -np 2 python examples/horovod_imagenet.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import polytempo.horovod.torch as hvd  # was: import horovod.torch as hvd

CLASSES, IMAGES, SIDE, BATCH, EPOCHS, WARM_UP = 5, 320, 16, 16, 3, 1
PASSES = 2
"""Backward passes before each step."""


def block(inputs: int, outputs: int) -> nn.Module:
    """A convolution that halves the image."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Metric:
    """The mean of a value over all batches and ranks."""

    def __init__(self, name: str) -> None:
        self.name, self.sum, self.number = name, torch.tensor(0.0), 0

    def update(self, value: torch.Tensor) -> None:
        """Add a batch."""
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.number += 1

    def __float__(self) -> float:
        """The mean."""
        return float(self.sum / self.number)


hvd.init()
torch.manual_seed(0)
prototypes = torch.randn(CLASSES, 3, SIDE, SIDE)
labels = torch.arange(IMAGES) % CLASSES
images = prototypes[labels] + 2.0 * torch.randn(IMAGES, 3, SIDE, SIDE)
data = TensorDataset(images, labels)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
    data, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = DataLoader(data, batch_size=BATCH // hvd.size(), sampler=sampler)

model = nn.Sequential(block(3, 8), block(8, 16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES))
base_lr = 0.0125 * PASSES
optimizer = torch.optim.SGD(model.parameters(), lr=base_lr * hvd.size(), momentum=0.9, weight_decay=5e-5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=PASSES,
)

for epoch in range(EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    loss_mean, accuracy = Metric("loss"), Metric("accuracy")
    for number, (x, y) in enumerate(loader):
        progress = min(1.0, (epoch + (number + 1) / len(loader)) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = base_lr * (1 + progress * (hvd.size() - 1))
        if number % PASSES == 0:
            optimizer.zero_grad()
        scores = model(x)
        loss = nn.functional.cross_entropy(scores, y)
        (loss / PASSES).backward()
        loss_mean.update(loss)
        accuracy.update((scores.argmax(dim=1) == y).float().mean())
        if (number + 1) % PASSES == 0:
            optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {float(loss_mean):.3f}, {float(accuracy):.1%} right, {hvd.size()} worker(s)")
