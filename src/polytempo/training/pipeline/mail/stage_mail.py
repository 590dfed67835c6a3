"""`StageMail`: the tensors of one stage that are on their way to other stages, or from them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Codec, EncodeContext, Port
from polytempo.core.coding import decoded, encoded, wire_like
from polytempo.core.op import Work
from polytempo.partition.cut import Cut, Value
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts
from polytempo.partition.wires import Way

LOSS_TAG, DELAY_TAG = 0, 1
"""Tags of a stage's messages without tensors of the model."""
_FIRST_TAG = 2
_FIRST_CHANNEL, _NUM_CHANNELS, _PIPELINES_OF_A_CHANNEL = 500, 380, 1000
"""Behind the channels of buckets, and before the channels of `SharedGradients` and others."""


class _Lane(NamedTuple):
    """The messages of one tensor to, or about, one part that uses it; they keep the order of micro-batches."""

    name: str
    target: int
    way: Way


class _Encoded(NamedTuple):
    """A wire that is received, and the tensor that it becomes."""

    wire: Work[Tensor]
    like: Tensor
    codec: Codec
    when: EncodeContext
    port: Port


class StageMail:
    """The tensors under way, encoded by `schedule.wires`. A part at the same stage gets the tensor itself.

    A buffer is given back when its message is over. Awaited is only the message before the last `held`, which has been
    received by then: a stage that holds so many micro-batches has had an answer to the one before them.
    """

    def __init__(self, cut: Cut, schedule: Schedule, stage: int) -> None:
        self._stage, self._num_stages, self._num_parts = stage, schedule.stages, len(cut.stages)
        self._wires = schedule.wires
        every = [facts(schedule, each) for each in range(schedule.stages)]
        self._held = max(each.held + each.target_delay for each in every)
        self._numbers = {value.name: number for number, value in enumerate(cut.values)}
        self._tags = _tags(cut, schedule.stages)
        self._arriving: dict[_Lane, deque[Tensor | Work[Tensor] | _Encoded]] = defaultdict(deque)
        self._leaving: dict[_Lane, deque[Work[None]]] = defaultdict(deque)
        self._last: tuple[EncodeContext, Tensor] | None = None

    async def expect(self, port: Port, value: Value, target: int, way: Way, like: Tensor, micro_batch: int) -> None:
        """Begin to receive the next tensor of a lane, which is of `micro_batch`, unless it is of this stage itself."""
        lane, source = _Lane(value.name, target, way), value.source if way == "forward" else target
        peer = self._stage_of(source)
        if peer == self._stage:
            return
        codec = self._wires.codec(way, like)
        room = like if codec is None else wire_like(codec, like)
        work = await port.start(port.borrow(room, peer, self._tags[lane]))
        when = self._when(port, lane, source, micro_batch)
        self._arriving[lane].append(work if codec is None else _Encoded(work, like, codec, when, port))

    async def take(self, name: str, target: int, way: Way) -> Tensor:
        """The next tensor of a lane; waits for it."""
        arrived: Any = self._arriving[_Lane(name, target, way)].popleft()
        if isinstance(arrived, Tensor):
            return arrived
        if not isinstance(arrived, _Encoded):
            found: Tensor = await arrived
            return found
        like = torch.empty(arrived.like.shape, dtype=arrived.like.dtype, device=arrived.like.device)
        return await decoded(arrived.port, await arrived.wire, like, arrived.codec, arrived.when)

    async def put(self, port: Port, value: Value, target: int, way: Way, tensor: Tensor, micro_batch: int) -> None:
        """Send a tensor on its lane; it must stay as it is."""
        lane, peer = _Lane(value.name, target, way), self._stage_of(target if way == "forward" else value.source)
        if peer == self._stage:
            self._arriving[lane].append(tensor)
            return
        when = self._when(port, lane, value.source if way == "forward" else target, micro_batch)
        wire = await self._wire(port, lane, tensor, when)
        leaving = self._leaving[lane]
        leaving.append(await port.start(port.lend(wire, peer, self._tags[lane])))
        if len(leaving) > self._held:
            await leaving.popleft()

    async def settle(self) -> None:
        """Wait until everything that was sent has been taken."""
        for leaving in self._leaving.values():
            while leaving:
                await leaving.popleft()

    async def _wire(self, port: Port, lane: _Lane, tensor: Tensor, when: EncodeContext) -> Tensor:
        codec = self._wires.codec(lane.way, tensor)
        if codec is None:
            return tensor
        if self._last is None or self._last[0] != when:
            what = lane.name if lane.way == "forward" else f"the gradient of {lane.name}"
            self._last = when, await encoded(port, tensor, codec, when, f"{what}, which stage {self._stage} sends")
        return self._last[1]

    def _when(self, port: Port, lane: _Lane, source: int, micro_batch: int) -> EncodeContext:
        """The same for all who use a tensor, also in a run that goes on; another for each replica."""
        tensor = 2 * (self._numbers[lane.name] * self._num_parts + source) + (lane.way == "backward")
        return EncodeContext(step=micro_batch + 1, rank=port.members[self._stage_of(source)], tensor=tensor)

    def _stage_of(self, part: int) -> int:
        return part % self._num_stages


def own_messages(stages: Port) -> Port:
    """The channel of a pipeline by its port's series: other pipelines' messages never come to it.

    A schedule that does not wait leaves messages under way after every step, also in a pipeline that is abandoned.
    Errors: ValueError where there were too many pipelines in the world.
    """
    channel, place = divmod(stages.series, _PIPELINES_OF_A_CHANNEL)
    if channel >= _NUM_CHANNELS:
        raise ValueError(
            f"a world has channels for {_NUM_CHANNELS * _PIPELINES_OF_A_CHANNEL} pipelines, and this is number "
            f"{stages.series}; start the processes again"
        )
    return stages.on_channel(_FIRST_CHANNEL + channel).on_channel(place)


def _tags(cut: Cut, num_stages: int) -> dict[_Lane, int]:
    """Different ones for the lanes from one stage to another, and small, for a transport has few of them."""
    found, used = dict[_Lane, int](), Counter[tuple[int, int]]()
    for lane, *ends in _lanes(cut):
        sender, receiver = (part % num_stages for part in ends)
        found[lane] = _FIRST_TAG + used[sender, receiver]
        used[sender, receiver] += sender != receiver
    return found


def _lanes(cut: Cut) -> Iterator[tuple[_Lane, int, int]]:
    """Each with the parts that send and receive."""
    for value in cut.values:
        for target in value.targets:
            yield _Lane(value.name, target, "forward"), value.source, target
            yield _Lane(value.name, target, "backward"), target, value.source
