"""`Plateau`: torch's ReduceLROnPlateau, moved by a run's scores.

step     1 … 40      41 … 80      81 … 120          an epoch of 40 steps, `patience=0`
score    0.90        0.70         0.71              of the test set, the same on all ranks
lr       0.1         0.1          0.1    0.01       a score without progress lowers the rate of the next steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from polytempo.spec.callbacks.early_stop import is_better_small
from polytempo.spec.run_options import ScoreInterval


class Plateau(ReduceLROnPlateau):
    """A learning rate that falls when a run's scores stop getting better. See `plateau`."""

    metric: str
    seen_step: int
    """The steps before the last score that it has seen."""
    seen_epoch: float

    @classmethod
    def of(cls, made: ReduceLROnPlateau, metric: str | None = None) -> Plateau:
        """`made`, which must not be used afterwards. Its metric: "loss", and "accuracy" for mode "max"."""
        if isinstance(made, Plateau):
            return made
        found = cls.__new__(cls)
        found.__dict__.update(made.__dict__)
        found.metric = metric or ("loss" if made.mode == "min" else "accuracy")
        found.seen_step, found.seen_epoch = 0, 0.0
        for group in made.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return found

    def is_due(self, step: int, epoch: float, every: ScoreInterval | None, fewest: int) -> bool:
        """True for a score after `step` steps and `epoch` epochs that it has not seen. `every`: the interval of scores;
        None: the ends of epochs, at least `fewest` steps apart."""
        if step <= self.seen_step:
            return False
        if every is not None:
            return every.is_due(step, self.seen_epoch, epoch)
        return step - self.seen_step >= fewest and isclose(epoch, round(epoch), abs_tol=1e-9)

    def see(self, score: Mapping[str, float | None], step: int, epoch: float) -> None:
        """Take a score. ValueError where it lacks the metric."""
        value = score.get(self.metric)
        if value is None:
            known = ", ".join(name for name, found in score.items() if found is not None)
            raise ValueError(f"plateau(metric={self.metric!r}): a score of this job has {known}; give one of these")
        self.seen_step, self.seen_epoch = step, epoch
        self.step(value)

    def hold(self, rates: Sequence[float]) -> None:
        """Go on at these rates, one a parameter group."""
        self._last_lr = list(rates)
        self.set_rates()

    def set_rates(self) -> None:
        """Give the optimizer the rates of this state."""
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def plateau(
    optimizer: Optimizer,
    *,
    metric: str = "loss",
    better: Literal["auto", "less", "more"] = "auto",
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    cooldown: int = 0,
    min_lr: float = 0.0,
) -> Plateau:
    """Multiply the learning rate by `factor` after more than `patience` scores in a row without progress.

        pt.run(job, strategy, workers=2, schedule="plateau(metric=accuracy, factor=0.5, patience=3)")

    A score is better if it is below best · (1 - threshold), or above best · (1 + threshold) where `better` is "more"
    ("auto": less for a metric with "loss" in its name, else more). It is `torch.optim.lr_scheduler.ReduceLROnPlateau`,
    stepped at the end of each epoch, or by `eval_every`, with the score that all ranks agree on. All ranks wait for
    that score, on real processes and under the virtual clock. The state is part of checkpoints.

    `metric`: "loss", "accuracy" or one of the job's metrics. Errors: ValueError for a factor of 1 or more.
    """
    mode: Literal["min", "max"] = "min" if is_better_small(metric, better) else "max"
    made = ReduceLROnPlateau(optimizer, mode, factor, patience, threshold=threshold, cooldown=cooldown, min_lr=min_lr)
    return Plateau.of(made, metric)
