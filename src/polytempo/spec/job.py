"""`Job`: a training, apart from its distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polytempo.spec.rates.schedules import NamedSchedule

_CALLED = {
    "model": "model()",
    "data": "data(path)",
    "loss": "loss(output, target)",
    "optimizer": "optimizer(parameters, lr)",
    "correct": "correct(output, target)",
    "predictions": "predictions(output, target)",
    "schedule": "schedule(optimizer, steps_per_epoch)",
    "weight": "weight(batch)",
}
_OPTIONAL = ("correct", "predictions", "schedule", "weight")
OF_ROWS = frozenset({"kind", "step", "epoch", "samples", "seconds", "loss", "accuracy", "samples_per_s", "worker"})
"""Names of other entries of rows."""


class Data(NamedTuple):
    """The samples that a job learns from, and the samples that measure it (None: nothing).

    A sample is anything that `collate` makes a batch of, a list of samples at a time. The default is torch's
    `default_collate`: tensors, numbers, tuples and dicts of these, of equal shapes. Ragged samples need a function that
    pads them. The form of a batch must suit the job's loss.
    """

    train: Dataset[Any]
    test: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    more: Mapping[str, Dataset[Any]] = MappingProxyType({})
    """Further test sets by name, such as {"noisy": noisy}: each score has their `noisy/loss` and `noisy/accuracy`."""

    def training(self) -> Dataset[Any] | DataLoader[Any]:
        """The training data as `Shard` and `Batches` take them: with the function that makes batches."""
        if self.collate is None:
            return self.train
        if isinstance(self.train, DataLoader):
            raise ValueError(
                "the data name a collate function, and their DataLoader has one of its own; give the loader's data "
                "set instead: Data(loader.dataset, collate=...)"
            )
        return DataLoader(self.train, shuffle=not isinstance(self.train, IterableDataset), collate_fn=self.collate)


@dataclass(frozen=True)
class OfBatch:
    """A function of the model and a whole batch; see `of_batch`."""

    function: Callable[[nn.Module, Any], Tensor]
    divisor: Any = None
    """Divisor of a loss (`spec.loss_divisor.Divisor`); None: it is not known."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The function's answer."""
        return self.function(model, batch)


def of_batch(function: Callable[[nn.Module, Any], Tensor]) -> OfBatch:
    """Mark a job's `loss` or `correct` as a function of the model and the batch: `function(model, batch)`, for any
    batch.

        pt.Job(
            loss=pt.of_batch(lambda model, batch: model(**batch).loss),
            correct=pt.of_batch(lambda model, batch: model(**batch).logits.argmax(-1) == batch["labels"]),
            ...
        )

    The loss is the mean over the batch, as a tensor of one element. Cost: where a job has both, scoring a batch takes
    two forward passes.
    """
    return OfBatch(function)


@dataclass(frozen=True)
class Job:
    """A model, its data, its loss and its optimizer. Everything is a function, called in each worker.

    job = pt.Job(
        model=lambda: nn.Linear(64, 10),
        data=lambda path: pt.Data(*pt.data.digits()),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    )
    """

    model: Callable[[], nn.Module]
    """Makes the model; called after the seed is set, so every worker makes the same one."""
    data: Callable[[Any], Data]
    """Reads the data; its argument is the value of `--data`: a Path, a URL as text, or None."""
    loss: Callable[[Any, Any], Tensor]
    """`loss(output, target)`: the mean over the batch, which is a pair (input, target). Or `of_batch(loss)`, which is
    called as `loss(model, batch)`. If it is not a mean over samples, name its divisor by `divided_by`."""
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    """Makes the optimizer from the parameters and the learning rate."""
    lr: float = 0.1
    batch_size: int = 32
    """Samples per worker and step."""
    epochs: int = 10
    correct: Callable[[Any, Any], Tensor] | None = None
    """`correct(output, target)`: booleans, or numbers from 0 to 1; their mean is the accuracy. None: there is none. Or
    `of_batch(correct)`, which is called as `correct(model, batch)`."""
    metrics: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further scores of the test set, by name: `metric(predictions, targets)` of the whole set, for any number of
    ranks, or an object of torchmetrics. They see the model's output and the target; see `predictions`."""
    predictions: Callable[[Any, Any], Any] | None = None
    """`predictions(output, target)`: the pair (predictions, targets) that `metrics` see, such as
    `lambda output, target: (output.argmax(-1), target)`. None: output and target. Or `of_batch(predictions)`, which is
    called as `predictions(model, batch)`."""
    schedule: Callable[[Optimizer, int], LRScheduler] | str | None = None
    """Makes a learning-rate schedule from the optimizer and the number of steps an epoch has; stepped every step.

    Or its text, as `RunOptions.schedule` takes it. A ReduceLROnPlateau is stepped by scores (see `plateau`).

    With a parameter server each batch has the rate of its place in the run, whichever worker takes it, and whenever."""
    weight: Callable[[Any], Any] | None = None
    """`weight(batch)`: a batch's weight where batches are joined, such as its tokens that count. None: its samples.

    A step's gradient is Σ wᵢ gᵢ / Σ wᵢ over all ranks and micro-batches, where gᵢ is the gradient of a loss that is the
    mean over wᵢ. Strategies that do not average gradients at each step have it within a worker. A batch that weighs 0
    is not computed. Cost: 8 bytes a rank in each step, added by a tree before the forward pass."""
    name: str = "job"
    origin: str | None = None
    """Name for `jobs.find`, so that another process can find the job again; a file's path is absolute."""

    def __post_init__(self) -> None:
        """Refuse other objects than functions where one is called, and numbers that no run could use."""
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", NamedSchedule(self.schedule))
        for name, makes in _CALLED.items():
            part = getattr(self, name)
            if isinstance(part, nn.Module) and name == "model":
                raise ValueError(
                    f"job {self.name}: model is a {type(part).__name__} that is made already, and each worker makes "
                    f"its own; write model=lambda: {type(part).__name__}(…)"
                )
            if not callable(part) and not (part is None and name in _OPTIONAL):
                shown = part if isinstance(part, str | int | float | None) else f"a {type(part).__name__}"
                raise ValueError(f"job {self.name}: {name} is {shown!s}; expected a function, called as {makes}")
        self._check_metrics()
        for name in ("lr", "batch_size", "epochs"):
            value = getattr(self, name)
            whole = name == "batch_size"
            if not isinstance(value, int if whole else int | float) or not value > 0:
                number = "whole number" if whole else "number"
                raise ValueError(f"job {self.name}: {name} is {value!r}; expected a {number} above 0")

    def _check_metrics(self) -> None:
        if not isinstance(self.metrics, Mapping):
            raise ValueError(f"job {self.name}: metrics is {self.metrics!r}; expected a dict, as {{'f1': f1_score}}")
        for name, metric in self.metrics.items():
            if not isinstance(name, str) or not name or name in OF_ROWS:
                taken = f"rows of metrics have an entry {name} already; call it something else"
                raise ValueError(f"job {self.name}: metrics names {name!r}; {taken if name else 'give it a name'}")
            if not callable(metric) and not callable(getattr(metric, "update", None)):
                expected = "a function metric(predictions, targets), or an object of torchmetrics"
                raise ValueError(f"job {self.name}: the metric {name} is {metric!r}; expected {expected}")
        if self.metrics and isinstance(self.loss, OfBatch) and not isinstance(self.predictions, OfBatch):
            raise ValueError(
                f"job {self.name}: metrics see predictions and targets, and with loss=pt.of_batch(…) a batch may have "
                "any form; give predictions=pt.of_batch(lambda model, batch: (predictions, targets)), too"
            )


def check_job(given: object) -> Job:
    """`given`, if it is a job. ValueError where it is something else, such as a model or the function of one."""
    if isinstance(given, Job):
        return given
    is_model = isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module))
    what = f"{getattr(given, '__name__', type(given).__name__)}(…)" if is_model else "…"
    raise ValueError(
        f"a job is the answer of pt.Job or pt.jobs.find, got {given!r}; write pt.Job(model=lambda: {what}, data=…, "
        'loss=…, optimizer=…), or pt.jobs.find("digits")'
    )


def most_likely(output: Tensor, target: Tensor) -> Tensor:
    """True for right predictions: the largest of the last dim's scores is the target. Shapes (…, classes), (…)."""
    return output.argmax(-1) == target
