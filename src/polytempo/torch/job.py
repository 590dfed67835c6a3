"""`Job`: what to train, apart from how it is distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset


class Data(NamedTuple):
    """What a job learns from, and what it is measured on (None: nothing). Samples are pairs (input, target)."""

    train: Dataset[Any]
    test: Dataset[Any] | None = None


@dataclass(frozen=True)
class Job:
    """A model, its data, its loss and its optimizer. Everything is a function, called in each worker.

    job = pt.Job(
        model=lambda: nn.Linear(64, 10),
        data=lambda folder: pt.data.digits(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    )
    """

    model: Callable[[], nn.Module]
    """Makes the model; called after the seed is set, so every worker makes the same one."""
    data: Callable[[Path | None], Data]
    """Reads the data; its argument is the folder or file given as `--data`."""
    loss: Callable[[Any, Any], Tensor]
    """`loss(output, target)`: the mean over the batch."""
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    """Makes the optimizer from the parameters and the learning rate."""
    lr: float = 0.1
    batch_size: int = 32
    """Samples per worker and step."""
    epochs: int = 10
    correct: Callable[[Any, Any], Tensor] | None = None
    """`correct(output, target)`: booleans whose mean is the accuracy; None where there is none."""
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """Makes a learning-rate schedule from the optimizer and the number of steps an epoch has; stepped every step.

    With a parameter server each batch has the rate of its place in the run, whichever worker takes it, and whenever."""
    name: str = "job"
    origin: str | None = None
    """What `jobs.find` found it by, so that another process can find it again; a file's path is absolute."""


def most_likely(output: Tensor, target: Tensor) -> Tensor:
    """Which predictions are right: the largest of the last dim's scores is the target. Shapes (…, classes), (…)."""
    return output.argmax(-1) == target
