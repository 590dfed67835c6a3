"""`RateSchedule`: a job's learning-rate schedule by the place of a batch in the run, not by a worker's own steps.

    ticket   0 1 2 3   4 5 6 7   8 9 …      3 workers, 4 batches an epoch, so the schedule has 1 step an epoch
    step     0 0 0 0   1 1 1 1   2 2 …      of it, whichever worker takes a ticket, however often it is dealt

So the rates of a run do not depend on slow workers, on a worker's lives, or on the step of a resume.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polytempo.core.calls.refusals import refuse
from polytempo.spec.rates.schedules import has_ended

Make = Callable[[Optimizer, int], LRScheduler]

_PROBED_STEPS = 2


class RateSchedule:
    """The schedule that `make` makes for `optimizer`, with `steps_per_epoch` of its steps in an epoch's `batches`.

    A schedule of torch goes forwards only, so it is stepped to a batch's place, and its numbers on the way (learning
    rates; momentum or betas, if it moves them) are remembered. Memory: 8 bytes a number and step. A worker that begins
    late steps through all missed steps: some 10 µs a step.

    `movable`: the options that the schedule may move, None for any. Where the optimizer runs in the shards that is the
    learning rate alone, as nothing else travels with a push.

    Errors: ValueError for a schedule that moves other options; `Incompatible` (PT1551) for a `Plateau`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: Make,
        *,
        steps_per_epoch: int,
        batches: int,
        movable: Collection[str] | None = None,
    ) -> None:
        self._optimizer, self._steps_per_epoch, self._batches = optimizer, steps_per_epoch, batches
        self._movable = movable
        self._names = [list(_numbers(group)) for group in optimizer.param_groups]
        self._fixed = list(self._read(fixed=True))
        self._scheduler = make(optimizer, steps_per_epoch)
        optimizer.step()  # without gradients it does nothing, but torch warns of a schedule that steps before it
        if isinstance(self._scheduler, ReduceLROnPlateau):
            refuse({"plateau", "server"}, strategy="a parameter server")
        self._width = sum(1 for _ in self._read())
        self._remembered = array("d")
        self._remember()

    def step_of(self, epoch: int, batch: int) -> int:
        """The schedule's step for batch number `batch` of an epoch."""
        return epoch * self._steps_per_epoch + batch * self._steps_per_epoch // self._batches

    def go_to(self, step: int) -> None:
        """Set the optimizer's parameter groups to their numbers in `step` (the first is 0)."""
        known = len(self._remembered) // self._width
        if step >= known:
            self._write(known - 1)  # many schedules go on from the rate that they find
        for _ in range(known, step + 1):
            if not has_ended(self._scheduler):
                self._scheduler.step()
            self._remember()
        self._write(step)

    def _remember(self) -> None:
        if list(self._read(fixed=True)) != self._fixed:
            raise ValueError(
                f"{type(self._scheduler).__name__} moves more than {', '.join(self._movable or ())}, and the parameter "
                "server hears of nothing else; use cycle_momentum=False, or easgd, with steps of the workers' own"
            )
        self._remembered.extend(self._read())

    def _read(self, *, fixed: bool = False) -> Iterator[float]:
        """The groups' numbers; `fixed`: the ones outside of `movable`."""
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            for name in names:
                if not fixed or (self._movable is not None and name not in self._movable):
                    yield from map(float, group[name]) if isinstance(group[name], tuple) else [float(group[name])]

    def _write(self, step: int) -> None:
        values = iter(self._remembered[step * self._width : (step + 1) * self._width])
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            for name in names:
                present = group[name]
                if isinstance(present, Tensor):
                    present.fill_(next(values))
                else:
                    group[name] = tuple(next(values) for _ in present) if isinstance(present, tuple) else next(values)


def check_schedule(optimizer: Optimizer, make: Make, steps_per_epoch: int, movable: Collection[str] | None) -> None:
    """Raise where `RateSchedule` would, as far as a few steps show it. `optimizer` is given away.

    `steps_per_epoch`: the run's, because a schedule may warm up for a part of them, and divide by it.
    """
    schedule = RateSchedule(optimizer, make, steps_per_epoch=steps_per_epoch, batches=steps_per_epoch, movable=movable)
    schedule.go_to(min(_PROBED_STEPS, steps_per_epoch))


def _numbers(group: dict[str, Any]) -> Iterator[str]:
    for name, value in group.items():
        parts = value if isinstance(value, tuple) else (value,)
        if name not in ("params", "initial_lr") and all(_is_number(part) for part in parts):
            yield name


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.dtype.is_floating_point and value.numel() == 1
    )
