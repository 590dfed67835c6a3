"""`SharedGradients`: weights that several stages use, which have one gradient: the sum over the stages."""

from __future__ import annotations

import torch
from torch import nn

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts

_CHANNEL = 900


class SharedGradients:
    """Adds up the gradients of tied weights before each update. Every stage that holds one takes part.

    Raises ValueError for a schedule with stages that update by different batches: there would be no such sum.
    """

    def __init__(self, cut: Cut, schedule: Schedule, stage: int) -> None:
        self._groups: list[tuple[tuple[int, ...], list[nn.Parameter]]] = []
        self.counted_elsewhere: list[nn.Parameter] = []
        """Parameters that an earlier stage has as well: the norm of the whole gradient has each once."""
        for name, users in cut.shared.items():
            stages = tuple(sorted({part % schedule.stages for part in users}))
            if len(stages) == 1:
                continue
            if any(facts(schedule, each).delay for each in stages):
                raise ValueError(
                    f"parameter {name} is shared by stages {stages}, and with {schedule} each of them updates it by "
                    'the gradient of another batch; keep its uses together (cut with tied="together"), or use a '
                    "schedule that waits, such as one_f_one_b"
                )
            if stage in stages:
                own = [part for part in users if part % schedule.stages == stage]
                named = {part: dict(cut.stages[part].module.named_parameters(remove_duplicate=False)) for part in own}
                held = {id(p): p for part in own for p in [named[part][users[part]]]}
                self._groups.append((stages, list(held.values())))
                if stage != stages[0]:
                    self.counted_elsewhere += held.values()

    async def summed(self, port: Port) -> None:
        """`.grad` of each shared weight becomes the sum over its stages; the same bits on all of them.

        It stays None if no stage has one: a number beside each weight counts the stages with a gradient.
        """
        for number, (stages, parameters) in enumerate(self._groups):
            for parameter in parameters:
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                counted = torch.cat([mine.reshape(-1), mine.new_full((1,), float(parameter.grad is not None))])
                total = await tree(port.among(stages).on_channel(_CHANNEL + number), counted)
                unused = not total.is_meta and not total[-1]
                parameter.grad = None if unused else total[:-1].view_as(parameter)
