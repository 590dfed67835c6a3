"""What a large batch loses, and what a scaled rate, a warm-up and LARS or LAMB win back: digits, at equal epochs.

    python benchmarks/large_batch/main.py [--seeds 3] [--batch 256]

One process trains on the batch that so many workers would have together: synchronous SGD computes the same.
Then a step of LARS and of LAMB beside torch's fused Adam, on 25 million parameters and one thread, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import polytempo as pt
from polytempo.large_batch import LAMB, LARS, cosine, decayed, linear, schedule, square_root, warm_up
from polytempo.large_batch.rates import Factor
from polytempo.spec.job import most_likely

SMALL, LR, EPOCHS = 16, 0.01, 15
Make = Callable[[nn.Module, float], Optimizer]


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """With momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def accuracy(seed: int, batch: int, make: Make, lr: float, factors: Iterable[Factor]) -> float:
    """Of the test set after the last epoch, in percent."""
    torch.manual_seed(seed)
    digits = pt.data.digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = make(model, lr)
    images, labels = digits.train.tensors
    steps = len(images) // batch
    scheduler = schedule(*factors)(optimizer, steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images))
        for chosen in order[: steps * batch].view(steps, batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            scheduler.step()
    test_images, test_labels = digits.test.tensors
    with torch.no_grad():
        return 100 * float(most_likely(model(test_images), test_labels).float().mean())


def lars(model: nn.Module, lr: float) -> Optimizer:
    """LARS, whose biases do not decay."""
    return LARS(decayed(model, 1e-4), lr=lr, trust=0.02)


def lamb(model: nn.Module, lr: float) -> Optimizer:
    """LAMB, whose biases do not decay."""
    return LAMB(decayed(model, 0.01), lr=lr)


def contenders(batch: int) -> dict[str, tuple[int, Make, float, list[Factor]]]:
    """Batch, optimizer, rate, and how the rate goes."""
    times = batch / SMALL
    gradual = [warm_up(3, start=1 / times)]
    return {
        "small batch": (SMALL, sgd, LR, []),
        "large batch, rate as it was": (batch, sgd, LR, []),
        "rate x sqrt k": (batch, sgd, LR * square_root(times), []),
        "rate x k": (batch, sgd, LR * linear(times), []),
        "rate x k, warm-up": (batch, sgd, LR * linear(times), gradual),
        "LARS, warm-up, cosine": (batch, lars, 1.0, [*gradual, cosine(EPOCHS)]),
        "LAMB, warm-up, cosine": (batch, lamb, 0.05, [*gradual, cosine(EPOCHS)]),
    }


def step_times(turns: int = 15) -> dict[str, float]:
    """Median milliseconds of a step on 25 million parameters, each in its turn."""
    weights = [nn.Parameter(torch.randn(1000, 1000)) for _ in range(25)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    rules: dict[str, Any] = {
        "Adam(fused)": partial(torch.optim.Adam, lr=1e-6, fused=True),
        "LARS": partial(LARS, lr=1e-6),
        "LAMB": partial(LAMB, lr=1e-6),
    }
    optimizers = {name: make(weights) for name, make in rules.items()}
    taken: dict[str, list[float]] = {name: [] for name in rules}
    for turn in range(turns + 1):
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"digits, {EPOCHS} epochs, seeds 0 to {given.seeds - 1}: accuracy in percent, mean (each)")
    for name, (batch, make, lr, factors) in contenders(given.batch).items():
        found = [accuracy(seed, batch, make, lr, factors) for seed in range(given.seeds)]
        each = ", ".join(f"{value:.1f}" for value in found)
        print(f"| {name} | {batch} | {lr:g} | {statistics.mean(found):.1f} ({each}) |")
    times = step_times()
    for name, taken in times.items():
        print(f"| {name} | {taken:.1f} ms | {taken / times['Adam(fused)']:.2f} |")


if __name__ == "__main__":
    main()
