"""`StageMail`: the tensors of one stage that are on their way to other stages, or from them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.compression.point_to_point import decoded, encoded, wire_like
from polytempo.core import EncodeContext, Port
from polytempo.core.op import Work
from polytempo.partition.cut import Cut, Value
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts
from polytempo.training.pipeline.wires import AS_THEY_ARE, Way, Wires


class _Lane(NamedTuple):
    """The messages of one tensor to, or about, one part that uses it; they keep the order of micro-batches."""

    name: str
    target: int
    way: Way


class _Arriving(NamedTuple):
    """A message that is received: its wire, and the tensor that it is to become."""

    work: Work[Tensor]
    like: Tensor
    source: int
    """The part that sends it."""


class StageMail:
    """What is under way, encoded as `wires` says. A part that is at the same stage gets a tensor as it is.

    A buffer is given back when its message is over. Awaited is only the message before the last `held`, which has been
    received by then: a stage that holds so many micro-batches has had an answer to the one before them.
    """

    def __init__(self, cut: Cut, schedule: Schedule, stage: int, wires: Wires = AS_THEY_ARE) -> None:
        self._stage, self._num_stages, self._num_parts = stage, schedule.stages, len(cut.stages)
        self._wires = wires
        every = [facts(schedule, each) for each in range(schedule.stages)]
        self._held = max(each.held + each.target_delay for each in every)
        self._numbers = {value.name: number for number, value in enumerate(cut.values)}
        self._arriving: dict[_Lane, deque[Tensor | _Arriving]] = defaultdict(deque)
        self._leaving: dict[_Lane, deque[Work[None]]] = defaultdict(deque)
        self._encoded: Counter[_Lane] = Counter()
        self._decoded: Counter[_Lane] = Counter()

    async def expect(self, port: Port, value: Value, target: int, way: Way, like: Tensor) -> None:
        """Begin to receive the next tensor of a lane, unless it is of this stage itself."""
        lane, source = _Lane(value.name, target, way), value.source if way == "forward" else target
        peer = self._stage_of(source)
        if peer != self._stage:
            codec = self._wires.codec(way, like)
            room = like if codec is None else wire_like(codec, like)
            work = await port.start(port.recv(room, peer, self._tag(lane)))
            self._arriving[lane].append(_Arriving(work, like, source))

    async def take(self, port: Port, name: str, target: int, way: Way) -> Tensor:
        """The next tensor of a lane; waits for it."""
        lane = _Lane(name, target, way)
        arrived = self._arriving[lane].popleft()
        if isinstance(arrived, Tensor):
            return arrived
        wire = await arrived.work
        codec = self._wires.codec(way, arrived.like)
        if codec is None:
            return wire
        self._decoded[lane] += 1
        when = self._when(port, lane, arrived.source, self._decoded[lane])
        like = torch.empty(arrived.like.shape, dtype=arrived.like.dtype, device=arrived.like.device)
        return await decoded(port, wire, like, codec, when)

    async def put(self, port: Port, value: Value, targets: Sequence[int], way: Way, tensor: Tensor) -> None:
        """Send a tensor, encoded once, to the parts that use it, or its gradient from one of them; it must stay as it
        is."""
        wire: Tensor | None = None
        for target in targets:
            peer, lane = self._stage_of(target if way == "forward" else value.source), _Lane(value.name, target, way)
            if peer == self._stage:
                self._arriving[lane].append(tensor)
                continue
            wire = await self._wire(port, value, lane, tensor) if wire is None else wire
            leaving = self._leaving[lane]
            leaving.append(await port.start(port.send(wire, peer, self._tag(lane))))
            if len(leaving) > self._held:
                await leaving.popleft()

    async def settle(self) -> None:
        """Wait until everything that was sent has been taken."""
        for leaving in self._leaving.values():
            while leaving:
                await leaving.popleft()

    async def _wire(self, port: Port, value: Value, lane: _Lane, tensor: Tensor) -> Tensor:
        codec = self._wires.codec(lane.way, tensor)
        if codec is None:
            return tensor
        self._encoded[lane] += 1
        source = value.source if lane.way == "forward" else lane.target
        when = self._when(port, lane, source, self._encoded[lane])
        what = value.name if lane.way == "forward" else f"the gradient of {value.name}"
        return await encoded(port, tensor, codec, when, f"{what}, which stage {self._stage} sends")

    def _when(self, port: Port, lane: _Lane, source: int, number: int) -> EncodeContext:
        """The same at all receivers of a tensor, and another for each replica."""
        tensor = self._tag(_Lane(lane.name, source, lane.way))
        return EncodeContext(step=number, rank=port.members[self._stage_of(source)], tensor=tensor)

    def _stage_of(self, part: int) -> int:
        return part % self._num_stages

    def _tag(self, lane: _Lane) -> int:
        return 2 * (self._numbers[lane.name] * self._num_parts + lane.target) + (lane.way == "backward")
