"""An optimizer's actions, measured: the ends of two weights show the applied gradients and rates, and their number.

    clock   its gradient is always SLOPE, so plain SGD moves it by SLOPE times the sum of the learning rates applied
    still   its gradient is always 0, so only weight decay moves it

All ranks see the same, so a strategy that leaves the optimizer alone ends where a loop of plain torch ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from polytempo.cluster import Cluster, Link
from polytempo.core import Strategy
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Data, Job
from polytempo.spec.result import Result

SLOPE = 3.0
"""A third of it, each of three ranks' part of the mean, is exact."""
LR, BATCH, STEPS = 0.1, 4, 11
CLUSTER = Cluster(Link(1e-5, 1e9), flops_per_s=1e7, workers_per_host=4)
Gradient = tuple[float, float]
PLAIN: Gradient = (SLOPE, 0.0)


class Optimized(NamedTuple):
    """An optimizer with weight decay, with a learning rate that falls in every step, or with both."""

    name: str
    decays: bool
    falls: bool

    def __str__(self) -> str:
        what = " and ".join(["weight decay"] * self.decays + ["schedule"] * self.falls)
        return f"{self.name}, {what}"

    def make(self, parameters: Iterable[nn.Parameter], lr: float = LR) -> Optimizer:
        """The optimizer of torch."""
        decay = 0.1 if self.decays else 0.0
        match self.name:
            case "sgd":
                return SGD(parameters, lr, weight_decay=decay)
            case "momentum":
                return SGD(parameters, lr, momentum=0.9, weight_decay=decay)
            case "nesterov":
                return SGD(parameters, lr, momentum=0.9, nesterov=True, weight_decay=decay)
            case "adamw":
                return AdamW(parameters, lr, weight_decay=decay)
        assert self.name == "adagrad"
        return Adagrad(parameters, lr, weight_decay=decay)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """The rate of step t (from 0): LR, or LR / (1 + t)."""
        return LambdaLR(optimizer, lambda step: 1 / (1 + step) if self.falls else 1.0)


NAMES = ("sgd", "momentum", "nesterov", "adamw", "adagrad")
OPTIMIZED = [Optimized(name, decays, not decays) for name, decays in product(NAMES, (True, False))]
WITH_BOTH = [Optimized(name, decays=True, falls=True) for name in NAMES]
"""A run of one of these ends where both keep their meaning: half as many runs as of each alone."""


class Weights(nn.Module):
    """The two weights, both 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.still = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """The loss of every sample."""
        return (SLOPE * self.clock + 0 * self.still).expand(len(inputs))

    def ends(self) -> Tensor:
        """(clock, still)."""
        return torch.cat([self.clock, self.still]).detach().clone()


def ended(
    strategy: Strategy, workers: int, optimized: Optimized, batch_size: int = BATCH, cluster: Cluster = CLUSTER
) -> tuple[list[Tensor], Result]:
    """Each worker's weights after STEPS steps in the virtual world."""
    models: list[Weights] = []

    def model() -> nn.Module:
        models.append(Weights())
        return models[-1]

    inputs = torch.zeros(batch_size * workers * STEPS, 1)
    job = Job(
        model=model,
        data=lambda folder: Data(TensorDataset(inputs, inputs)),
        loss=lambda output, target: output.mean(),
        optimizer=lambda parameters, lr: optimized.make(parameters),
        schedule=lambda optimizer, epoch_steps: optimized.schedule(optimizer),
        batch_size=batch_size,
    )
    result = simulate(job, strategy, workers, cluster, steps=STEPS)
    return [each.ends() for each in models[1:]], result


def stepped(optimized: Optimized, gradients: Iterable[Gradient | None]) -> Iterator[Weights]:
    """The usual loop; None: no step yet, so an optimizer does nothing."""
    weights = Weights()
    optimizer = optimized.make(weights.parameters())
    schedule = optimized.schedule(optimizer)
    for gradient in gradients:
        if gradient is not None:
            weights.clock.grad, weights.still.grad = torch.tensor(gradient, dtype=torch.float64).split(1)
        optimizer.step()
        schedule.step()
        yield weights


def end_of(optimized: Optimized, gradients: Iterable[Gradient | None]) -> Tensor:
    """The end of that loop."""
    *_, last = stepped(optimized, gradients)
    return last.ends()
