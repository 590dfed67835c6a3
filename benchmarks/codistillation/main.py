"""The gain of codistillation, and the smaller difference of two runs: digits, two groups with half of the data each.

    python benchmarks/codistillation/main.py [--seeds 5] [--steps 900] [--samples 0]

Each row is `codistillation` in the virtual world; in the first two groups train alone. All rows make the same steps on
the same halves. Accuracy is the mean of both groups' models; churn the difference of group 0's models of two runs, the
mean over all pairs of seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.jobs.digits import job, model
from polytempo.large_batch import churn
from polytempo.spec.job import most_likely

LR, BATCH = 0.02, 16


def predictions(strategy: Strategy, loss: Callable[[Tensor, Tensor], Tensor], seed: int, steps: int) -> list[Tensor]:
    """Probabilities of both groups' models on the test set."""
    models: list[nn.Module] = []

    def made() -> nn.Module:
        models.append(model())
        return models[-1]

    pt.simulate(replace(job, model=made, loss=loss), strategy, 2, steps=steps, batch_size=BATCH, lr=LR, seed=seed)
    images = pt.data.digits().test.tensors[0]
    with torch.no_grad():
        return [each(images).softmax(-1) for each in models[-2:]]


def accuracy(of: Tensor) -> float:
    """The accuracy in percent."""
    return 100 * float(most_likely(of, pt.data.digits().test.tensors[1]).float().mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--samples", type=int, default=0, help="train on so many samples alone; 0: on all")
    given = parser.parse_args()
    if given.samples:
        shorten(given.samples)
    plain, smooth = nn.functional.cross_entropy, partial(nn.functional.cross_entropy, label_smoothing=0.1)
    made = partial(pt.strategies.codistillation, burn_in=200)
    rows = {
        "each alone (weight 0)": (made(period=50, weight=0.0), plain),
        "each alone, labels smoothed by 0.1": (made(period=50, weight=0.0), smooth),
        "codistillation, models 1 step old": (made(period=1), plain),
        "codistillation, models up to 50 steps old": (made(period=50), plain),
        "codistillation, up to 200 steps old": (made(period=200), plain),
    }
    print(f"{'':42} accuracy (each seed)                          churn")
    for name, (strategy, loss) in rows.items():
        found = [predictions(strategy, loss, seed, given.steps) for seed in range(given.seeds)]
        each = [statistics.mean(map(accuracy, groups)) for groups in found]
        changes = [churn(a[0], b[0]) for a, b in combinations(found, 2)]
        shown = ", ".join(f"{value:.1f}" for value in each)
        print(f"{name:42} {statistics.mean(each):5.2f} ({shown})   {statistics.mean(changes):.4f}", flush=True)


def shorten(samples: int) -> None:
    """Let the job train on the first samples alone."""
    read = job.data

    def fewer(path: object) -> pt.Data:
        data = read(None)
        assert isinstance(data.train, TensorDataset)
        return data._replace(train=TensorDataset(*(tensor[:samples] for tensor in data.train.tensors)))

    object.__setattr__(job, "data", fewer)


if __name__ == "__main__":
    main()
