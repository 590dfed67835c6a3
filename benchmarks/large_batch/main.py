"""The loss of a large batch, and the gains of a scaled rate, a warm-up and LARS or LAMB: digits, at equal epochs.

    python benchmarks/large_batch/main.py [--seeds 3] [--batch 256]

One process trains on the batch that so many workers would have together: synchronous SGD computes the same. Then a step
of LARS and of LAMB against torch's fused Adam, on 25 million parameters and one thread, in turns: 25 tensors of a
million, and the tensors of ResNet-50; and a copy of as many bytes, the memory's limit.
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
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def accuracy(seed: int, batch: int, make: Make, lr: float, factors: Iterable[Factor]) -> float:
    """The accuracy on the test set after the last epoch, in percent."""
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
    """LARS without decay of biases."""
    return LARS(decayed(model, 1e-4), lr=lr, trust=0.02)


def lamb(model: nn.Module, lr: float) -> Optimizer:
    """LAMB without decay of biases."""
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


def resnet_50() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 parameters, 25.6 million numbers (He et al., 2016, table 1)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers = [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            layers += [(4 * inner, width, 1, 1)] if block == 0 else []
            shapes += [shape for layer in layers for shape in (layer, layer[:1], layer[:1])]
            width = 4 * inner
    return [*shapes, (1000, width), (1000,)]


TENSORS: dict[str, list[tuple[int, ...]]] = {"25 of 1000 x 1000": [(1000, 1000)] * 25, "ResNet-50": resnet_50()}


def step_times(shapes: list[tuple[int, ...]], turns: int = 15) -> dict[str, float]:
    """Median milliseconds of a step on tensors of these shapes, each in its turn."""
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    rules: dict[str, Any] = {
        "Adam(fused)": partial(torch.optim.Adam, lr=1e-6, fused=True),
        "LARS": partial(LARS, lr=1e-6),
        "LAMB": partial(LAMB, lr=1e-6),
    }
    steps: dict[str, Callable[[], Any]] = {name: make(weights).step for name, make in rules.items()}
    flat = torch.randn(2, sum(weight.numel() for weight in weights))
    steps["copy"] = lambda: flat[0].copy_(flat[1])
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", action="store_true", help="only the times of steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.steps:
        accuracies(given.seeds, given.batch)
    for name, shapes in TENSORS.items():
        times = step_times(shapes)
        for rule, taken in times.items():
            print(f"| {name} | {rule} | {taken:.1f} ms | {taken / times['Adam(fused)']:.2f} |")


def accuracies(seeds: int, batch: int) -> None:
    """Print the table of losses and gains."""
    print(f"digits, {EPOCHS} epochs, seeds 0 to {seeds - 1}: accuracy in percent, mean (each)")
    for name, (size, make, lr, factors) in contenders(batch).items():
        found = [accuracy(seed, size, make, lr, factors) for seed in range(seeds)]
        each = ", ".join(f"{value:.1f}" for value in found)
        print(f"| {name} | {size} | {lr:g} | {statistics.mean(found):.1f} ({each}) |")


if __name__ == "__main__":
    main()
