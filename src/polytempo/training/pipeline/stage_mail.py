"""`StageMail`: the tensors of one stage that are on their way to other stages, or from them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Literal, NamedTuple

from torch import Tensor

from polytempo.core import Port
from polytempo.core.op import Work
from polytempo.partition.cut import Cut, Value
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts

Way = Literal["forward", "backward"]


class _Lane(NamedTuple):
    """The messages of one tensor to, or about, one part that uses it; they keep the order of micro-batches."""

    name: str
    target: int
    way: Way


class StageMail:
    """What is under way. A part that is at the same stage gets a tensor as it is.

    A buffer is given back when its message is over. Awaited is only the message before the last `held`, which has been
    received by then: a stage that holds so many micro-batches has had an answer to the one before them.
    """

    def __init__(self, cut: Cut, schedule: Schedule, stage: int) -> None:
        self._stage, self._num_stages, self._num_parts = stage, schedule.stages, len(cut.stages)
        every = [facts(schedule, each) for each in range(schedule.stages)]
        self._held = max(each.held + each.target_delay for each in every)
        self._numbers = {value.name: number for number, value in enumerate(cut.values)}
        self._arriving: dict[_Lane, deque[Tensor | Work[Tensor]]] = defaultdict(deque)
        self._leaving: dict[_Lane, deque[Work[None]]] = defaultdict(deque)

    async def expect(self, port: Port, value: Value, target: int, way: Way, like: Tensor) -> None:
        """Begin to receive the next tensor of a lane, unless it is of this stage itself."""
        lane, peer = _Lane(value.name, target, way), self._stage_of(value.source if way == "forward" else target)
        if peer != self._stage:
            self._arriving[lane].append(await port.start(port.recv(like, peer, self._tag(lane))))

    async def take(self, name: str, target: int, way: Way) -> Tensor:
        """The next tensor of a lane; waits for it."""
        arrived: Any = self._arriving[_Lane(name, target, way)].popleft()
        return arrived if isinstance(arrived, Tensor) else await arrived

    async def put(self, port: Port, value: Value, target: int, way: Way, tensor: Tensor) -> None:
        """Send a tensor on its lane; it must stay as it is."""
        lane, peer = _Lane(value.name, target, way), self._stage_of(target if way == "forward" else value.source)
        if peer == self._stage:
            self._arriving[lane].append(tensor)
            return
        leaving = self._leaving[lane]
        leaving.append(await port.start(port.send(tensor, peer, self._tag(lane))))
        if len(leaving) > self._held:
            await leaving.popleft()

    async def settle(self) -> None:
        """Wait until everything that was sent has been taken."""
        for leaving in self._leaving.values():
            while leaving:
                await leaving.popleft()

    def _stage_of(self, part: int) -> int:
        return part % self._num_stages

    def _tag(self, lane: _Lane) -> int:
        return 2 * (self._numbers[lane.name] * self._num_parts + lane.target) + (lane.way == "backward")
