"""`mnist` and `mnist_cnn`: a perceptron and a small convolutional network on MNIST or Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from polytempo import data
from polytempo.jobs import folder_of
from polytempo.spec.job import Data, Job, most_likely

EXPECTED = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (or .gz)"


def perceptron() -> nn.Module:
    """784 - 256 - 128 - 10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convolutional() -> nn.Module:
    """Two convolutions (16 and 32 channels), each halved by pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def read(given: str | Path | None, job: str = "mnist") -> Data:
    """The four IDX files in the folder given as `--data`; errors call the job by its name."""
    return Data(*data.mnist(folder_of(given, job, EXPECTED)))


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def schedule(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    """The learning rate halves every epoch, evenly over the steps, down to a 32nd."""
    return LambdaLR(optimizer, lambda step: max(0.5 ** (step / steps_per_epoch), 1 / 32))


job = Job(
    name="mnist",
    model=perceptron,
    data=read,
    loss=functional.cross_entropy,
    optimizer=optimizer,
    lr=0.03,
    batch_size=32,
    epochs=3,
    correct=most_likely,
    schedule=schedule,
)
"""60,000 images to train on, 10,000 to test with."""

cnn = replace(job, name="mnist_cnn", model=convolutional, data=partial(read, job="mnist_cnn"))
"""The same with a convolutional network."""
