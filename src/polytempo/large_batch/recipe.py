"""FireCaffe's recipe: a model that is known to train on one worker is trained on many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polytempo.large_batch.rates import linear, polynomial, schedule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    AnyJob = TypeVar("AnyJob", bound=DataclassInstance)


@dataclass(frozen=True)
class Recipe:
    """All numbers of a run with a large batch, and its optimizer and schedule."""

    workers: int
    batch_size: int
    """Samples of each worker and step."""
    lr: float
    """The learning rate of the first step."""
    epochs: float
    momentum: float
    weight_decay: float
    """Weight decay of weights; biases, and other parameters of one dimension or none, do not decay."""
    power: float
    """The power of the rate's polynomial, (1 - t/T)^power, which is 0 after the last epoch T."""

    @property
    def global_batch_size(self) -> int:
        """Samples of all workers in one step."""
        return self.workers * self.batch_size

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> Optimizer:
        """Momentum SGD. `lr`: another first rate than the recipe's, as a job's function of that name gets it."""
        groups = decayed(list(parameters), self.weight_decay)
        return SGD(groups, lr=self.lr if lr is None else lr, momentum=self.momentum)

    def schedule(self, optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
        """The polynomial, step by step."""
        return schedule(polynomial(self.epochs, self.power))(optimizer, steps_per_epoch)

    def of_job(self, job: AnyJob) -> AnyJob:
        """`job` with this recipe's optimizer, rates, batch and epochs: `pt.run(recipe.of_job(job), …, workers=N)`.

        It is made of functions that this process alone has, so engines that find a job by its name need it in a file.
        """
        numbers = {"lr": self.lr, "batch_size": self.batch_size, "epochs": self.epochs}
        return dataclasses.replace(job, optimizer=self.optimizer, schedule=self.schedule, **numbers)


def firecaffe(
    workers: int,
    *,
    lr: float,
    batch_size: int,
    epochs: float,
    each: int | None = None,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    power: float = 0.5,
) -> Recipe:
    """FireCaffe's recipe for so many workers, from the rate that is known to be good for `batch_size` on one.

        B = workers · each        γ = lr · B / batch_size        γₜ = γ (1 - t/T)^power

    each: samples of a worker, `batch_size` where it is not given. The paper's own: `firecaffe(32, lr=0.01,
    batch_size=256, each=32, epochs=…)` is its Network-in-Network with B = 1024 and γ = 0.04.

    The rate grows linearly with the batch, without a warm-up: beyond some batch, which depends on the task, a
    `warm_up` beside it or LARS goes further. Errors: ValueError for numbers that are not positive (momentum and decay:
    negative, and a momentum of 1 or more).
    Source: F. N. Iandola et al., "FireCaffe: near-linear acceleration of deep neural network training on compute
    clusters", 2016. Deviation: biases do not decay.
    """
    each = batch_size if each is None else each
    given = {"workers": workers, "lr": lr, "batch_size": batch_size, "epochs": epochs, "each": each, "power": power}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if not (0 <= momentum < 1 and 0 <= weight_decay < float("inf")):
        raise ValueError(
            f"momentum is at least 0 and below 1, weight_decay at least 0, got {momentum!r} and {weight_decay!r}"
        )
    rate = lr * linear(workers * each / batch_size)
    return Recipe(workers, each, rate, epochs, momentum, weight_decay, power)


def same_decay(weight_decay: float, times: float, rate_times: float) -> float:
    """The weight decay that shrinks weights in an epoch as before: λ k / (γ'/γ).

    A step multiplies a weight by 1 - γλ (in SGD, and in AdamW), and a batch k times as large makes k times fewer steps
    an epoch. With the linear rule the decay stays as it is; with the square root it is √k times as large.
    """
    linear(rate_times)
    return weight_decay * linear(times) / rate_times


def norms_of_few(model: nn.Module, batch_size: int, least: int = 32) -> list[str]:
    """The names of batch norms with statistics over fewer than `least` samples, where a worker has `batch_size`.

    Each worker normalises by its own samples, however many workers there are: 32 of them in the paper, which keeps that
    number while it changes the batch. With fewer, the statistics are noisy, and evaluation's fit them badly:
    give each worker more samples (fewer workers, or steps of several local ones), use `nn.SyncBatchNorm` or group norm.
    Source: P. Goyal et al., 2017, section 2.3 and remark 3.
    """
    if batch_size >= least:
        return []
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def decayed(model: nn.Module | Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer: weights decay; biases, and other parameters of one dimension or none, do not.

        torch.optim.SGD(decayed(model, 1e-4), lr=0.1, momentum=0.9)

    Instead of the model its parameters may be given, as a job's `optimizer` has them. Errors: ValueError for a
    negative decay.

    Source: P. Goyal et al., "Accurate, large minibatch SGD", 2017, section 5.1: not on the gains of batch norm; X. Jia
    et al., 2018, not on biases either.
    """
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be a number of at least 0, got {weight_decay!r}")
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def zero_gains_(model: nn.Module, *patterns: str) -> Sequence[str]:
    """Set to 0 the gains of the norms with names that match, such as "*.bn2": each residual block begins as the
    identity.

    Returns their names. Errors: ValueError where a pattern matches no module with a gain.
    Source: P. Goyal et al., 2017, section 5.1.
    """
    weights = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    gains = {name: gain for name, gain in weights.items() if isinstance(gain, nn.Parameter) and gain.ndim == 1}
    found = []
    for pattern in patterns:
        chosen = [name for name in gains if fnmatch(name, pattern)]
        if not chosen:
            raise ValueError(f"no norm of this model is called {pattern!r}; with a gain: {', '.join(gains) or 'none'}")
        for name in chosen:
            gains[name].zero_()
        found += chosen
    return found
