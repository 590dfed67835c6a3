"""`a9a`: logistic regression on UCI Adult, 123 binary features (does income exceed 50,000 dollars?)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from polytempo import data
from polytempo.jobs import folder_of
from polytempo.spec.job import Data, Job, most_likely

NUM_FEATURES = 123


def model() -> nn.Module:
    """Scores of the two classes, linear in the features."""
    return nn.Linear(NUM_FEATURES, 2)


def read(given: str | Path | None) -> Data:
    """The LIBSVM files `a9a` and `a9a.t` in the folder given as `--data`."""
    folder = folder_of(given, "a9a", "the files a9a and a9a.t (LIBSVM text)")
    missing = [name for name in ("a9a", "a9a.t") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"job a9a: {folder} has no {' and no '.join(missing)}; expected a9a and a9a.t (LIBSVM text)")
    return Data(*data.libsvm(folder / "a9a", folder / "a9a.t", NUM_FEATURES))


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=lr)


job = Job(
    name="a9a",
    model=model,
    data=read,
    loss=functional.cross_entropy,
    optimizer=optimizer,
    lr=0.1,
    batch_size=64,
    epochs=3,
    correct=most_likely,
)
"""32,561 rows to train on, 16,281 to test with; always answering no reaches 76.4 %."""
