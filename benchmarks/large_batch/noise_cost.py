"""The cost of measuring the noise scale in a training step: two ranks on this host, with and without, in turns.

    python benchmarks/large_batch/noise_cost.py [--models 3]

Each rank trains three equal models with synchronous SGD: one is not measured, one every 32 steps, one in every step; a
turn has 64 steps of each. It prints the ratio of the medians of turns, which should be at most 1.02, and from the third
model the cost of a look: with K steps between two looks it is look / (K step) of the time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import polytempo as pt

EVERY, STEPS = 32, 64
SIZES = {
    "64-128-10, batch 32": ((64, 128, 10), 32, 31),
    "784-1024-1024-10, batch 32": ((784, 1024, 1024, 10), 32, 9),
    "25 M parameters, batch 16": ((1024, 4096, 4096, 1024), 16, 3),
}
"""Widths, samples of a rank, and turns."""


def step_of(widths: tuple[int, ...], batch: int, every: int | None) -> Callable[[], None]:
    """A step of an attached loop."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pt.attach(model, optimizer, noise_scale=every, batch_size=None if every is None else batch)
    x, y = torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measured(rank: Any, models: int) -> dict[str, list[list[float]]]:
    """Milliseconds of every step: without, with a look now and then, and with one in each."""
    pt.init(quiet=True)
    found = {}
    for name, (widths, batch, turns) in list(SIZES.items())[:models]:
        steps = [step_of(widths, batch, every) for every in (None, EVERY, 1)]
        taken: list[list[float]] = [[], [], []]
        for turn in range(turns + 1):
            for kind, step in enumerate(steps):
                for _ in range(STEPS):
                    begin = time.perf_counter()
                    step()
                    if turn:
                        taken[kind].append(1e3 * (time.perf_counter() - begin))
        found[name] = taken
    return found


def turns_of(taken: list[float]) -> float:
    """The median over turns of a step's mean."""
    return statistics.median(statistics.mean(taken[i : i + STEPS]) for i in range(0, len(taken), STEPS))


def undisturbed(without: list[float], with_noise: list[float]) -> float:
    """The ratio in the quickest fifth of steps, which other programs of the machine disturb least.

    Every 32nd step has a look, and its messages may meet the next one; the other steps are as without a look.
    """

    def quick(found: list[float]) -> float:
        return statistics.quantiles(found, n=5)[0]

    plain = quick(without)
    looks = [sum(with_noise[i : i + 2]) for i in range(0, len(with_noise), EVERY)]
    return 1 + (quick(looks) - 2 * plain) / (EVERY * plain)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=len(SIZES), help="so many, the smallest first")
    given = parser.parse_args()
    print(f"ms a step, medians of turns of {STEPS} steps, rank 0 of 2")
    print("| model | without | with | ratio | ratio of the quickest steps | a look | steps between looks for 2 % |")
    [answer, _] = pt.launch(partial(measured, models=given.models), 2, threads=1, timeout_s=600)
    for name, (without, with_noise, each) in answer.items():
        medians = turns_of(without), turns_of(with_noise)
        look = turns_of(each) - medians[0]
        ratio, quick = medians[1] / medians[0], undisturbed(without, with_noise)
        enough = math.ceil(look / (0.02 * medians[0]))
        print(f"| {name} | {medians[0]:.3f} | {medians[1]:.3f} | {ratio:.3f} | {quick:.3f} | {look:.3f} | {enough} |")


if __name__ == "__main__":
    main()
