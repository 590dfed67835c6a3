"""Keskar's ordering: a net trained with a large batch ends in a sharper minimum than with a small one.

    POLYTEMPO_DATA=FOLDER python benchmarks/large_batch/keskar.py [--train 60000] [--batches 256 6000] [--epochs 8 40]

MNIST, the paper's net F1 (784, five layers of 512 with batch norm and ReLU, 10) with Adam at its default rate, a small
batch and one of a tenth of the training set, for so many epochs. All is measured on so many training samples
(`--samples`), with batch norms by their saved statistics. `--train`: the first so many images, of 60,000.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from polytempo.report.pictures.loss_landscape import draw_line

PART = 6000
PAPER = {1e-3: (1.23, 205.14), 5e-4: (0.61, 42.90)}
"""Table 3, A = I: batches of 256 and of 6,000."""
SUBSPACE = 100
Samples = tuple[Tensor, Tensor]


def f1() -> nn.Module:
    """The paper's network F1."""
    widths = [784, 512, 512, 512, 512, 512]
    layers = [
        each for begin, end in pairwise(widths) for each in (nn.Linear(begin, end), nn.BatchNorm1d(end), nn.ReLU())
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(512, 10))


def trained(samples: Samples, batch: int, epochs: int, seed: int, until: float = 0.0) -> nn.Module:
    """The net after so many epochs, or after one with a mean loss of at most `until`; without incomplete batches."""
    torch.manual_seed(seed)
    model = f1()
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = samples
    steps = len(images) // batch
    for epoch in range(epochs):
        begin, total = time.perf_counter(), 0.0
        for chosen in torch.randperm(len(images))[: steps * batch].view(steps, batch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        seconds = time.perf_counter() - begin
        print(f"seed {seed}, batch {batch}, epoch {epoch + 1}: loss {total / steps:.2e}, {seconds:.0f} s", flush=True)
        if total / steps <= until:
            break
    return model.eval()


class WholeLoss:
    """The mean loss of a model over all samples, part by part."""

    def __init__(self, model: nn.Module, samples: Samples) -> None:
        self._model, self._samples = model, samples

    def __call__(self) -> Iterator[Tensor]:
        """The parts, which add up."""
        images, labels = self._samples
        for at in range(0, len(images), PART):
            part = functional.cross_entropy(
                self._model(images[at : at + PART]), labels[at : at + PART], reduction="sum"
            )
            yield part / len(images)


def measured(model: nn.Module, samples: Samples, test: Samples, seed: int) -> dict[str, Any]:
    """A trained net's losses, accuracy, and sharpness of its minimum."""
    loss, parameters = WholeLoss(model, samples), list(model.parameters())
    with torch.no_grad():
        found: dict[str, Any] = {
            "loss": sum(float(part) for part in loss()),
            "accuracy": 100 * float((model(test[0]).argmax(1) == test[1]).float().mean()),
        }
    for epsilon in PAPER:
        found[f"phi {epsilon:g}"] = pt.large_batch.sharpness(loss, parameters, epsilon, seed=seed)
    found["phi 0.001 in 100"] = pt.large_batch.sharpness(loss, parameters, 1e-3, subspace=SUBSPACE, seed=seed)
    found["SAM 0.05"] = pt.large_batch.neighbourhood_loss(loss, parameters)
    found["top eigenvalue"] = pt.large_batch.top_eigenvalue(loss, parameters, steps=15, seed=seed).value
    return found


def line(models: list[nn.Module], names: tuple[str, str], samples: Samples, folder: Path) -> dict[str, Any]:
    """The loss on the way from the small batch's net to the large batch's, and its picture."""
    at = [-0.5 + k / 12 for k in range(25)]
    small, large = ([*each.parameters(), *(b for b in each.buffers() if b.is_floating_point())] for each in models)
    losses = pt.large_batch.losses_between(WholeLoss(models[0], samples), small, large, at)
    draw_line(folder / "line.png", at, losses, names)
    return {"at": at, "losses": losses}


def main() -> None:
    """Train, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=60_000)
    parser.add_argument("--batches", type=int, nargs=2, default=(256, 6000), metavar=("SMALL", "LARGE"))
    parser.add_argument("--epochs", type=int, nargs=2, default=(8, 40), metavar=("SMALL", "LARGE"))
    parser.add_argument("--until", type=float, default=0.0, help="the mean loss of an epoch that ends a training")
    parser.add_argument("--samples", type=int, default=60_000, help="training samples that losses are measured on")
    parser.add_argument("--pictures", type=Path, help="a folder for the loss along the line between both nets")
    given = parser.parse_args()
    data = pt.data.mnist(Path(os.environ["POLYTEMPO_DATA"]) / "mnist")
    test = data.test.tensors
    samples, some = ((data.train.tensors[0][:n], data.train.tensors[1][:n]) for n in (given.train, given.samples))
    rows: dict[int, list[dict[str, Any]]] = {batch: [] for batch in given.batches}
    names = tuple(f"batch {batch:,}" for batch in given.batches)
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        models = []
        for batch, epochs in zip(rows, given.epochs, strict=True):
            models.append(trained(samples, batch, epochs, seed, given.until))
            rows[batch].append(measured(models[-1], some, test, seed))
            print(json.dumps({"seed": seed, "batch": batch, **rows[batch][-1]}), flush=True)
        if given.pictures is not None and seed == given.first_seed:
            print(json.dumps(line(models, names, some, given.pictures)), flush=True)
    print(f"\n| | {names[0]} | {names[1]} | large / small | paper |\n|---|---|---|---|---|")
    for name in rows[given.batches[0]][0]:
        small, large = (sum(row[name] for row in rows[batch]) / given.seeds for batch in rows)
        paper = {f"phi {e:g}": f"{a:g}, {b:g}: {b / a:.0f}" for e, (a, b) in PAPER.items()}.get(name, "")
        print(f"| {name} | {small:.4g} | {large:.4g} | {large / small:.3g} | {paper} |")


if __name__ == "__main__":
    main()
