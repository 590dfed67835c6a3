"""The two networks of Han et al. 2016 on MNIST, as jobs: `lenet.py:lenet_300_100` and `lenet.py:lenet_5`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from polytempo.jobs import mnist


def lenet_300_100() -> nn.Module:
    """784 - 300 - 100 - 10: 266,610 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def lenet_5() -> nn.Module:
    """Caffe's LeNet: convolutions of 20 and 50 channels, each halved by pooling, 800 - 500 - 10: 431,080 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Caffe's solver for LeNet: SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4)


lenet_300_100_job = replace(
    mnist.job,
    name="lenet_300_100",
    model=lenet_300_100,
    data=partial(mnist.read, job="lenet_300_100"),
    optimizer=optimizer,
    lr=0.05,
    batch_size=64,
    epochs=10,
)
lenet_5_job = replace(
    lenet_300_100_job, name="lenet_5", model=lenet_5, data=partial(mnist.read, job="lenet_5"), epochs=3, lr=0.03
)
