"""`PricedWork`: what `StageWork` is of a part of a model, with sizes alone: no value is computed, all is charged.

forward   ──▶ tensors on the meta device, as large as those that others use
backward  ──▶ no gradients; the stage sends zeros, which have no values either
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.partition.cut import Stage
from polytempo.partition.schedules.action import Schedule
from polytempo.training.pipeline.late.parameter_versions import ParameterVersions
from polytempo.training.pipeline.stage_work import Head, LayoutsOf, UnderWay, splits


class PricedWork:
    """One part. `layouts`: of every tensor that crosses a cut, by micro-batch."""

    def __init__(self, part: Stage, versions: ParameterVersions, schedule: Schedule, layouts: LayoutsOf) -> None:
        self._part, self._versions, self._layouts = part, versions, layouts
        self._splits = splits(schedule, part)
        self._trained = [parameter for parameter in part.module.parameters() if parameter.requires_grad]
        self.under_way: dict[int, UnderWay] = {}
        self.last_version = 0

    def forward(
        self,
        number: int,
        inputs: tuple[Any, ...],
        taken: Sequence[Tensor],
        version: int,
        seeded: Callable[[], None],
        head: Head | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """What others use has sizes only; a loss is 0."""
        self._versions.begun(version)
        self.under_way[number] = UnderWay((), [], [], version, head, seeded)
        layouts = self._layouts(number)
        given = [torch.empty(layouts[n][0], dtype=layouts[n][1], device="meta") for n in self._part.gives]
        return given, None if head is None else torch.zeros(())

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """No gradient of what was taken; those of the parameters have sizes only."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if not self._splits:
            self._done(number)
        return [None] * len(self._part.takes)

    def weight_gradients(self, number: int) -> None:
        """They are there."""
        self._done(number)

    def resume(self, number: int, kept: UnderWay) -> None:
        """A run that is only priced saves nothing."""
        raise AssertionError("a run that is only priced is not resumed")

    def _done(self, number: int) -> None:
        self.last_version = self.under_way.pop(number).version
        self._versions.done(self.last_version)
