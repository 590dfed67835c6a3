"""Corrections of late gradients at a stage: `DelayedRate` (PipeMare) and `PredictedParameters` (SpecTrain)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from polytempo.core.state import Saved
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.correction import PipeMare
from polytempo.partition.schedules.facts import facts


class LateStage(Protocol):
    """A correction at work on one stage."""

    def for_forward(self) -> list[Tensor] | None:
        """The values that a forward pass computes with; None: the present ones."""

    def for_backward(self) -> list[Tensor] | None:
        """The values that a backward pass multiplies by; None: the present ones."""

    def updating(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""

    def state(self) -> Saved:
        """The correction's state."""

    def restore(self, source: Saved) -> None:
        """Go on from there."""


def late_stage(
    schedule: Schedule, stage: int, parameters: Sequence[nn.Parameter], optimizer: Optimizer
) -> LateStage | None:
    """The schedule's correction on this stage; None where it has none, or nothing is late.

    Errors: ValueError for an optimizer that the correction does not go with, on all stages alike: a stage that raises
    alone leaves the others waiting.
    """
    delays = [facts(schedule, each).delay for each in range(schedule.stages)]
    if schedule.correction is None or not any(delays):
        return None
    if isinstance(schedule.correction, PipeMare):
        return DelayedRate(schedule.correction, delays[stage], parameters, optimizer) if delays[stage] else None
    _check_momentum(optimizer)
    return PredictedParameters(delays[stage], parameters, optimizer) if delays[stage] else None


def _check_momentum(optimizer: Optimizer) -> None:
    trained = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    if not isinstance(optimizer, SGD) or not all(group["momentum"] for group in trained):
        raise ValueError(
            f"spectrain predicts by the momentum of SGD, and the optimizer is {type(optimizer).__name__} without "
            "it; use torch.optim.SGD with momentum=0.9, or correct by pipemare instead"
        )


class DelayedRate:
    """PipeMare: the learning rate is smaller by the delay, and backward passes have parameters as they were."""

    def __init__(
        self, correction: PipeMare, delay: int, parameters: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> None:
        self._correction, self._delay = correction, delay
        self._parameters, self._optimizer = list(parameters), optimizer
        self._updates = 0
        self._changes = [torch.zeros_like(p) for p in self._parameters] if correction.decay else []

    def for_forward(self) -> None:
        """The present parameters."""

    def for_backward(self) -> list[Tensor] | None:
        """w - τ δ."""
        if not self._changes:
            return None
        present = [parameter.detach() for parameter in self._parameters]
        return list(torch._foreach_add(present, self._changes, alpha=-self._delay))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the learning rates are the delay's; afterwards they are the former ones."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        before = [parameter.detach().clone() for parameter in self._parameters] if self._changes else []
        for group in groups:
            group["lr"] = group["lr"] * self._correction.rate(self._updates, self._delay)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._updates += 1
        if self._changes:
            kept = self._correction.smoothing(self._delay)
            moved = torch._foreach_sub([parameter.detach() for parameter in self._parameters], before)
            torch._foreach_mul_(self._changes, kept)
            torch._foreach_add_(self._changes, moved, alpha=1 - kept)

    def state(self) -> Saved:
        """Updates so far, and δ."""
        return Saved({str(place): change for place, change in enumerate(self._changes)}, {"updates": self._updates})

    def restore(self, source: Saved) -> None:
        """Go on from there."""
        updates = source.scalars["updates"]
        assert isinstance(updates, int)
        self._updates = updates
        for place, change in enumerate(self._changes):
            change.copy_(source.tensors[str(place)])


class PredictedParameters:
    """SpecTrain: forward passes have the parameters that a batch's update will find, by SGD's momentum."""

    def __init__(self, delay: int, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
        self._delay, self._parameters, self._optimizer = delay, list(parameters), optimizer

    def for_forward(self) -> list[Tensor] | None:
        """w - s η v; before the first update w."""
        rates = {id(p): float(group["lr"]) for group in self._optimizer.param_groups for p in group["params"]}
        found = []
        for parameter in self._parameters:
            velocity = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            present = parameter.detach()
            ahead = 0.0 if velocity is None else self._delay * rates.get(id(parameter), 0.0)
            found.append(present.clone() if velocity is None else torch.add(present, velocity, alpha=-ahead))
        return found

    def for_backward(self) -> None:
        """The present parameters."""

    def updating(self) -> AbstractContextManager[None]:
        """No change."""
        return nullcontext()

    def state(self) -> Saved:
        """Nothing beside the optimizer's."""
        return Saved({}, {})

    def restore(self, source: Saved) -> None:
        """Nothing."""
