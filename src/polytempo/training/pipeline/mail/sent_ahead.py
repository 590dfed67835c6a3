"""`SentAhead`: messages of a stage for a later step of their receiver: a checkpoint has them at the sender.

stage 1   B t ──gradient──▶ (end of step t)        saved by stage 1; sent again when the run goes on
stage 0                                   B t
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from polytempo.core import Port
from polytempo.partition.cut import Cut, Value
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.wires import Way
from polytempo.training.pipeline.mail.stage_mail import StageMail


class SentTensor(NamedTuple):
    """A message with its micro-batch, value and direction."""

    micro_batch: int
    value: str
    target: int
    """The part that uses the value, which receives it or sends its gradient."""
    way: Way
    tensor: Tensor


class SentAhead:
    """Holds sent tensors until their receivers take them. Copies nothing."""

    def __init__(self, cut: Cut, schedule: Schedule, stage: int) -> None:
        self._schedule, self._stage = schedule, stage
        self._values: dict[str, Value] = {value.name: value for value in cut.values}
        self._last = _last_of_a_step(schedule, len(cut.stages))
        self.held: list[SentTensor] = []
        self._again: list[SentTensor] = []

    def note(self, micro_batch: int, value: Value, target: int, way: Way, tensor: Tensor) -> None:
        """A message is sent now."""
        receiver = target if way == "forward" else value.source
        sent = SentTensor(micro_batch, value.name, target, way, tensor)
        if receiver % self._schedule.stages != self._stage and self._taken(sent) < self._schedule.micro_batches - 1:
            self.held.append(sent)

    def forget(self, step: int) -> None:
        """Let go of tensors that receivers take in `step`, which is over."""
        first = step * self._schedule.micro_batches
        self.held = [sent for sent in self.held if sent.micro_batch > first + self._taken(sent)]

    def restore(self, sent: list[SentTensor]) -> None:
        """Hold the messages of another process."""
        self.held, self._again = list(sent), list(sent)

    async def again(self, port: Port, mail: StageMail) -> None:
        """Send the restored messages."""
        for sent in self._again:
            value = self._values[sent.value]
            await mail.put(port, value, sent.target, sent.way, sent.tensor, sent.micro_batch)
        self._again = []

    def _taken(self, sent: SentTensor) -> int:
        """The last micro-batch with a message of this kind within a step, counted from the step's first."""
        receiver = sent.target if sent.way == "forward" else self._values[sent.value].source
        return self._last[sent.way, receiver]


def _last_of_a_step(schedule: Schedule, parts: int) -> dict[tuple[Way, int], int]:
    """The last micro-batch with a message within a step, for each way and each part that receives."""
    back = ("backward", "input") if schedule.estimation is None else ("learn",)
    kinds: dict[Way, tuple[str, ...]] = {"forward": ("forward",), "backward": back}
    found = {}
    for part in range(parts):
        own = [each for each in schedule.actions(part % schedule.stages) if each.part == part // schedule.stages]
        for way, names in kinds.items():
            found[way, part] = max((each.micro_batch for each in own if each.kind in names), default=0)
    return found
