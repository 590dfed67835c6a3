"""A batch that grows where the rate would fall, and a scaled rate: digits and MNIST, at equal epochs.

    python benchmarks/large_batch/growth.py digits --seeds 5
    python benchmarks/large_batch/growth.py mnist --data FOLDER --seeds 3

First Smith's exchange: the rate divided by 5 twice, or the batch multiplied by 5 twice (`batch_growth`). Then
Goyal's: a large batch with the small one's rate, with the scaled one, and with a warm-up. SGD with momentum 0.9, one
process on the batch of all workers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import polytempo as pt
from polytempo.large_batch import falling, linear, schedule, warm_up
from polytempo.large_batch.rates import Factor
from polytempo.spec.job import Data, Job, most_likely
from polytempo.spec.job_calls import data_of
from polytempo.spec.objective import judged


class Setting(NamedTuple):
    """Batches, rates and epochs of one task."""

    batch: int
    lr: float
    epochs: int
    falls: tuple[int, int]
    small: int
    small_lr: float
    large: int
    scaled_epochs: int
    warm: float


SETTINGS = {
    "digits": Setting(16, 0.05, 12, (6, 9), 16, 0.01, 256, 15, 3),
    "mnist": Setting(32, 0.05, 6, (3, 5), 16, 0.005, 512, 4, 1),
}


class Ended(NamedTuple):
    """A run's end: the loss on all training data, the accuracy on the test set in percent, and its steps."""

    loss: float
    accuracy: float
    steps: int


def ended(
    job: Job,
    data: Data,
    batch: int,
    lr: float,
    epochs: float,
    factors: Sequence[Factor],
    growth: Mapping[int, float],
    seed: int,
) -> Ended:
    """Train in this process, and score on both sets."""
    made = replace(job, schedule=schedule(*factors), data=lambda folder: data)
    trainer = pt.Trainer(made, batch_size=batch, lr=lr, epochs=epochs, batch_growth=growth, seed=seed)
    result = trainer.fit()
    with torch.no_grad():
        loss = float(judged(made, trainer.model, data.train[:]).loss)
        images, labels = data.test[:]  # type: ignore[index]
        right = most_likely(trainer.model(images), labels).float().mean()
    return Ended(loss, 100 * float(right), result.steps)


def shown(name: str, found: list[Ended]) -> tuple[float, float]:
    """Print a row; the mean loss and accuracy."""
    loss, right = statistics.mean(e.loss for e in found), statistics.mean(e.accuracy for e in found)
    each = ", ".join(f"{e.accuracy:.1f}" for e in found)
    print(f"| {name} | {found[0].steps:,} | {loss:.4g} | {right:.2f} ({each}) |", flush=True)
    return loss, right


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(SETTINGS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    job, s = pt.jobs.find(given.task), SETTINGS[given.task]
    data = data_of(job, given.data)
    seeds = range(given.seeds)
    print(f"{given.task}, seeds 0 to {given.seeds - 1}")
    print("| | steps | training loss | test accuracy, mean (each) |")

    def row(name: str, run: Callable[[int], Ended]) -> tuple[float, float]:
        return shown(name, [run(seed) for seed in seeds])

    growth = dict.fromkeys(s.falls, 5.0)
    smaller, _ = row(
        "rate / 5 twice", lambda i: ended(job, data, s.batch, s.lr, s.epochs, [falling(s.falls, 0.2)], {}, i)
    )
    larger, _ = row("batch x 5 twice", lambda i: ended(job, data, s.batch, s.lr, s.epochs, [], growth, i))
    print(f"training loss of the larger batch beside the smaller rate: {larger / smaller:.3f}\n")
    times = s.large / s.small
    epochs, lr = s.scaled_epochs, s.small_lr
    _, base = row("small batch", lambda i: ended(job, data, s.small, lr, epochs, [], {}, i))
    _, same = row("large batch, rate as it was", lambda i: ended(job, data, s.large, lr, epochs, [], {}, i))
    _, bare = row("rate x k", lambda i: ended(job, data, s.large, lr * linear(times), epochs, [], {}, i))
    gradual = [warm_up(s.warm, start=1 / times)]
    _, warm = row("rate x k, warm-up", lambda i: ended(job, data, s.large, lr * linear(times), epochs, gradual, {}, i))
    print(
        f"points below the small batch: as it was {base - same:.2f}, x k {base - bare:.2f}, warm-up {base - warm:.2f}"
    )


if __name__ == "__main__":
    main()
