"""The steps of PyTorch's DDP tutorials: a toy model, a checkpoint that rank 0 writes, a snapshot to go on from.

Prints the same numbers on "polytempo" as on "gloo", and needs no data. It starts its workers itself, with
`torch.multiprocessing.spawn`; under torchrun it is one of the workers:

    python examples/integrations/ddp_tutorial.py --workers 2
    torchrun --standalone --nproc-per-node 2 examples/integrations/ddp_tutorial.py --backend gloo
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ToyModel(nn.Module):
    """10 → 10 → 5."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


class Trainer:
    """A loop that writes a snapshot after every epoch and goes on from it."""

    def __init__(self, snapshot: Path) -> None:
        torch.manual_seed(3)
        inputs = torch.randn(512, 10)
        data = TensorDataset(inputs, inputs @ torch.randn(10, 5))
        self.sampler: DistributedSampler[Any] = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=32, sampler=self.sampler)
        self.snapshot, self.epoch = snapshot, 0
        model = ToyModel()
        if snapshot.exists():
            state = load_file(snapshot)
            self.epoch = int(state.pop("epoch")) + 1
            model.load_state_dict(state)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, epochs: int) -> None:
        """Up to `epochs` epochs in all."""
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
            say(f"epoch {self.epoch}: {len(self.loader)} steps, loss {loss.item():.6f}")
            if dist.get_rank() == 0:
                save_file({**self.model.module.state_dict(), "epoch": torch.tensor(self.epoch)}, self.snapshot)
            self.epoch += 1
        dist.barrier()


def say(line: str) -> None:
    """Once, not once a rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on random data of this rank; the loss."""
    torch.manual_seed(dist.get_rank())
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()
    return loss.item()


def norm_of(model: nn.Module) -> float:
    squares = [float(parameter.detach().double().square().sum()) for parameter in model.parameters()]
    return math.sqrt(sum(squares))


def basic() -> None:
    """Ranks begin with different weights; DDP gives them rank 0's."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(ToyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, optimizer) for _ in range(4)]
    say(f"basic: losses {losses[0]:.6f} … {losses[-1]:.6f}, norm of the weights {norm_of(model):.6f}")


def checkpoint(path: Path) -> None:
    """Rank 0 writes, all wait, all read."""
    torch.manual_seed(0)
    model = DistributedDataParallel(ToyModel())
    if dist.get_rank() == 0:
        save_file(model.module.state_dict(), path)
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.module.load_state_dict(load_file(path))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.barrier()
    say(f"checkpoint: norm of the weights {norm_of(model):.6f}")


def work(backend: str) -> None:
    """Every worker's work, once it is in the group."""
    with TemporaryDirectory() as folder:
        agreed = [folder]
        dist.broadcast_object_list(agreed, src=0)
        basic()
        checkpoint(Path(agreed[0], "model.safetensors"))
        for epochs in (2, 4):  # the second is a new start, from the snapshot of the first
            Trainer(Path(agreed[0], "snapshot.safetensors")).train(epochs)
        dist.barrier()
    dist.destroy_process_group()


def spawned(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    dist.init_process_group(args.backend, init_method=f"file://{rendezvous}", rank=rank, world_size=args.workers)
    work(args.backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--workers", type=int, default=2, help="without torchrun")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group(args.backend)
        work(args.backend)
        return
    with TemporaryDirectory() as folder:
        spawn(spawned, (args, str(Path(folder, "store"))), nprocs=args.workers)


if __name__ == "__main__":
    main()
