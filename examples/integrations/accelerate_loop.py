"""Hugging Face Accelerate on "polytempo": make the process group first, then the `Accelerator`.

Accelerate chooses among the backends that it knows, and answers another name with "Your assigned backend polytempo is
not available". It uses an existing group, with any backend. Write `cpu=True` (or ACCELERATE_USE_CPU=true): without it,
and without a GPU, every rank trains for itself.

Prints the same numbers on "polytempo" as on "gloo", and needs no data. Needs `pip install accelerate`:

    torchrun --standalone --nproc-per-node 2 examples/integrations/accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 examples/integrations/accelerate_loop.py --backend gloo

`accelerate launch` starts several workers without GPUs through mpirun only, so torchrun is the simpler launcher here.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from polytempo.data import digits


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any]) -> tuple[int, int]:
    """The number of right test digits; the samples that fill up the last batch do not count."""
    model.eval()
    right = count = 0
    for images, labels in loader:
        with torch.no_grad():
            found = model(images).argmax(dim=1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        right, count = right + int((found == labels).sum()), count + len(labels)
    model.train()
    return right, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group(args.backend)  # before the Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    data = digits()
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = DataLoader(data.train, batch_size=32, shuffle=True)
    test_loader: Any = DataLoader(data.test, batch_size=64)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.5)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total, reduction="mean") / len(loader)
        right, count = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {mean.item():.6f}, {right} of {count} test digits right")
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type.value}")
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
