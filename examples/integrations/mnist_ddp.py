"""MNIST with DistributedDataParallel, as scripts for it are written; only the name of the backend is ours.

Prints the same numbers on "polytempo" as on "gloo". Needs the four files of MNIST in `mnist/` of a folder that `--data`
or the variable POLYTEMPO_DATA names:

    torchrun --standalone --nproc-per-node 2 examples/integrations/mnist_ddp.py --data path/to/data
    torchrun --standalone --nproc-per-node 2 examples/integrations/mnist_ddp.py --backend gloo
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from polytempo.data import mnist


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(16 * 6 * 6, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(images.view(-1, 1, 28, 28))), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2, padding=1)
        x = self.dropout(torch.flatten(x, 1))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1)


def train(model: nn.Module, loader: DataLoader[Any], optimizer: Adadelta, epoch: int, log_interval: int) -> None:
    """One epoch."""
    model.train()
    for index, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if index % log_interval == 0 and dist.get_rank() == 0:
            done = index * len(images) * dist.get_world_size()
            print(f"Train epoch {epoch} [{done}/{len(loader.dataset)}]  loss {loss.item():.6f}")  # type: ignore[arg-type]


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader[Any]) -> None:
    """Loss and accuracy over the parts of all ranks."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in loader:
        output = model(images)
        loss = functional.nll_loss(output, labels, reduction="sum")
        sums += torch.stack([loss.double(), (output.argmax(1) == labels).sum().double(), torch.tensor(len(labels))])
    dist.all_reduce(sums)
    loss_sum, correct, count = sums.tolist()
    if dist.get_rank() == 0:
        print(f"Test: average loss {loss_sum / count:.4f}, accuracy {correct:.0f}/{count:.0f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--data", default=os.environ.get("POLYTEMPO_DATA"), help="a folder with mnist/ in it")
    parser.add_argument("--samples", type=int, default=6000, help="of the training images; a third of it for the test")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--log-interval", type=int, default=20)
    found = parser.parse_args()
    if found.data is None:
        parser.error("no data: give --data FOLDER, or set POLYTEMPO_DATA, where FOLDER/mnist has the files of MNIST")
    return found


def main() -> None:
    args = arguments()
    dist.init_process_group(args.backend)
    torch.manual_seed(1 + dist.get_rank())  # dropout differs between the ranks; DDP copies rank 0's weights

    data = mnist(Path(args.data) / "mnist")
    train_set, test_set = Subset(data.train, range(args.samples)), Subset(data.test, range(args.samples // 3))
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    train_loader: DataLoader[Any] = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_loader: DataLoader[Any] = DataLoader(test_set, 200, sampler=DistributedSampler(test_set, shuffle=False))

    model = DistributedDataParallel(Net())
    optimizer = Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer, epoch, args.log_interval)
        test(model, test_loader)
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
