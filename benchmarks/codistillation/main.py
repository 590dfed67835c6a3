"""Codistillation's gain, and how much less two runs differ: two groups with half of the data each.

    python benchmarks/codistillation/main.py [--seeds 5] [--steps 900] [--samples 0]
    python benchmarks/codistillation/main.py --job a9a --data FOLDER --seeds 4 --samples 8000 --steps 1875 --batch 32

Each row is `codistillation` in the virtual world; in the first two groups train apart. All rows make the same steps on
the same halves. Accuracy is the mean of both groups' models; churn compares group 0's models of two runs, the mean over
all pairs of seeds. On digits models are nearly certain of each image; on a9a (an income above 50,000) of few rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.jobs import a9a, digits
from polytempo.large_batch import churn
from polytempo.spec.job import most_likely

LR = 0.02


class Problem(NamedTuple):
    """A job on some of its samples, with a model that scores classes."""

    job: pt.Job
    model: Callable[[], nn.Module]
    data: pt.Data
    batch: int


def problem(name: str, folder: str | None, samples: int, batch: int) -> Problem:
    """Digits, 64-128-10, or a9a, 123-128-2, on the first `samples` rows (0: all), both by SGD with momentum 0.9."""
    data = {"digits": digits.job, "a9a": a9a.job}[name].data(folder)
    assert isinstance(data.train, TensorDataset)
    train = TensorDataset(*(tensor[: samples or None] for tensor in data.train.tensors))
    wide = nn.Sequential(nn.Linear(a9a.NUM_FEATURES, 128), nn.ReLU(), nn.Linear(128, 2))
    made = digits.model if name == "digits" else partial(reset, wide)
    return Problem(digits.job, made, data._replace(train=train), batch)


def reset(model: nn.Module) -> nn.Module:
    """A copy with parameters drawn from torch's present state."""
    copy = deepcopy(model)
    for layer in copy.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return copy


def predictions(
    at: Problem, strategy: Strategy, loss: Callable[[Tensor, Tensor], Tensor], seed: int, steps: int
) -> list[Tensor]:
    """Probabilities of both groups' models on the test set."""
    models: list[nn.Module] = []

    def made() -> nn.Module:
        models.append(at.model())
        return models[-1]

    job = replace(at.job, model=made, loss=loss, data=lambda path: at.data)
    pt.simulate(job, strategy, 2, steps=steps, batch_size=at.batch, lr=LR, seed=seed)
    with torch.no_grad():
        return [each(at.data.test.tensors[0]).softmax(-1) for each in models[-2:]]


def accuracy(of: Tensor, targets: Tensor) -> float:
    """Percent of correct answers."""
    return 100 * float(most_likely(of, targets).float().mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--samples", type=int, default=0, help="train on so many samples alone; 0: on all")
    parser.add_argument("--job", choices=["digits", "a9a"], default="digits")
    parser.add_argument("--data", type=Path, help="a9a's folder")
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    at = problem(given.job, given.data, given.samples, given.batch)
    targets = at.data.test.tensors[1]
    plain, smooth = nn.functional.cross_entropy, partial(nn.functional.cross_entropy, label_smoothing=0.1)
    made = partial(pt.strategies.codistillation, burn_in=200)
    rows = {
        "each alone (weight 0)": (made(period=50, weight=0.0), plain),
        "each alone, labels smoothed by 0.1": (made(period=50, weight=0.0), smooth),
        "codistillation, models 1 step old": (made(period=1), plain),
        "codistillation, models up to 50 steps old": (made(period=50), plain),
        "codistillation, up to 200 steps old": (made(period=200), plain),
        "codistillation, up to 50 steps, weight 3": (made(period=50, weight=3.0), plain),
    }
    print(f"{'':42} accuracy (each seed)                          churn")
    for name, (strategy, loss) in rows.items():
        found = [predictions(at, strategy, loss, seed, given.steps) for seed in range(given.seeds)]
        each = [statistics.mean(accuracy(group, targets) for group in groups) for groups in found]
        changes = [churn(a[0], b[0]) for a, b in combinations(found, 2)]
        shown = ", ".join(f"{value:.1f}" for value in each)
        print(f"{name:42} {statistics.mean(each):5.2f} ({shown})   {statistics.mean(changes):.4f}", flush=True)


if __name__ == "__main__":
    main()
