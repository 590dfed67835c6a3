"""Sends and receives between the processes of one replica's stages, by their mailboxes.

    program ──▶ Send, Recv ──▶ through_stages ──▶ Post, Take ──▶ `server_calls` ──▶ world
            ──▶ everything else ─────────────────────────────▶

A process has one mailbox for its client, for the coordinator and for the other stages. Sent tensors are copied, so a
send is over immediately; a lost message is not sent again: its receiver gives up after its deadline. Messages are in
the host's memory: a device's tensor is copied there, and from there behind the device's work under way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from polytempo.core import Op, Port, Program, TimedOut, interpreted
from polytempo.core.op import Barrier, Parcel, Recv, Send, Start, Take, Work
from polytempo.device import DeviceCopy, HostCopy, on_accelerator
from polytempo.server.message import Message
from polytempo.server.timing import Timing

T = TypeVar("T")
_Lane = tuple[int, int, int]
"""(the other node, channel, tag)."""
_SENT: Final = object()
_MEETING = -1
"""The tag of meetings of all processes, from meeting 0 on; programs have tags from 0."""
_ALIGNED_BYTES = 64
"""Addresses of torch's tensors on the host are multiples of it."""
_PATIENCE = 4
"""A stage may wait for another stage that waits for a shard, so its deadline is this many times a worker's deadline
for a shard."""


class StageTensor(Message, frozen=True, eq=False):
    """From a process to another one of its replica: message `number` with this channel and tag."""

    incarnation: int
    """The replica's life: its processes are started together."""
    channel: int
    tag: int
    number: int
    value: Tensor


class _Expected:
    """A receive that was begun: message `number` of its lane."""

    def __init__(self, op: Recv, number: int) -> None:
        self.op, self.number = op, number
        self.value: Tensor | None = None

    def __str__(self) -> str:
        return str(self.op)


class StageMessages:
    """The messages of the process on node `port.world_rank` with the others of `nodes`: its replica's, by stages."""

    def __init__(self, port: Port, nodes: Sequence[int], incarnation: int, timing: Timing) -> None:
        self._port, self._nodes, self._incarnation, self._timing = port, nodes, incarnation, timing
        self._sent: Counter[_Lane] = Counter()
        self._expected: Counter[_Lane] = Counter()
        self._arrived: dict[tuple[_Lane, int], Tensor] = {}
        self._rest: deque[tuple[int, Parcel]] = deque()
        self._meetings = 1
        self._copies: deque[DeviceCopy] = deque()
        """Arrived tensors that a device may still read from the host."""

    async def meet(self) -> None:
        """Wait until all processes of the replica have a mailbox: the first hears of all, and says so."""
        port, first = self._port, self._nodes[0]
        if port.world_rank == first:
            await self._lead(0)
            return
        heard, until_s = ((first, 0, _MEETING), 0), await port.now() + self._patience_s
        while heard not in self._arrived:
            if await port.now() > until_s:
                raise TimedOut(port.world_rank, None, f"meeting with stage 0, node {first}", self._patience_s)
            await self._post(first, 0, _MEETING, 0, torch.empty(0))
            await self._take(self._timing.retry_s)

    async def perform(self, op: Op[Any]) -> Any:
        """The answer to an operation of the program."""
        match op:
            case Send():
                await self._send(op)
                return None
            case Start(Send() as what):
                await self._send(what)
                return Work(_SENT)
            case Recv():
                return await self._finished(self._begun(op))
            case Start(Recv() as what):
                return Work(self._begun(what))
            case Work(_Expected() as expected):
                return await self._finished(expected)
            case Work(handle) if handle is _SENT:
                return None
            case Barrier():
                await self._together()
                return None
            case Take(wait_s):
                return await self._taken(wait_s)
            case _:
                return await op

    @property
    def _patience_s(self) -> float:
        return _PATIENCE * self._timing.deadline_s

    async def _together(self) -> None:
        """A meeting of processes that have met: of the whole replica, for a program has no other group of stages."""
        first, number = self._nodes[0], self._meetings
        self._meetings += 1
        if self._port.world_rank == first:
            await self._lead(number)
            return
        await self._post(first, 0, _MEETING, number, torch.empty(0))
        await self._value(first, 0, _MEETING, number)

    async def _lead(self, number: int) -> None:
        """The first process hears of all others, and then says so."""
        for node in self._nodes[1:]:
            await self._value(node, 0, _MEETING, number)
        for node in self._nodes[1:]:
            await self._post(node, 0, _MEETING, number, torch.empty(0))

    async def _send(self, op: Send) -> None:
        lane = op.to, op.channel, op.tag
        await self._post(*lane, self._sent[lane], op.buffer)
        self._sent[lane] += 1

    async def _post(self, to: int, channel: int, tag: int, number: int, value: Tensor) -> None:
        if on_accelerator(value):
            [copied] = HostCopy([value.detach()]).wait()
        else:
            copied = value.detach().clone(memory_format=torch.contiguous_format)
        await self._port.post(StageTensor(self._incarnation, channel, tag, number, copied), to)

    def _begun(self, op: Recv) -> _Expected:
        lane = op.source, op.channel, op.tag
        self._expected[lane] += 1
        return _Expected(op, self._expected[lane] - 1)

    async def _finished(self, expected: _Expected) -> Tensor:
        if expected.value is None:
            op = expected.op
            value = await self._value(op.source, op.channel, op.tag, expected.number)
            expected.value = self._beside(op.like, value)
        return expected.value

    def _beside(self, like: Tensor, value: Tensor) -> Tensor:
        """The value on the device of `like`, at an address that torch would give a tensor.

        Products round by the addresses of their operands, and a value begins anywhere in a received message, so an
        equal run would end with other bits.
        """
        if not on_accelerator(like):
            return value.clone() if value.data_ptr() % _ALIGNED_BYTES else value
        while self._copies and self._copies[0].done:
            self._copies.popleft()
        self._copies.append(DeviceCopy(value, like.device))
        return self._copies[-1].tensor

    async def _value(self, source: int, channel: int, tag: int, number: int) -> Tensor:
        key = (source, channel, tag), number
        await self._until(lambda: key in self._arrived, f"recv of a tensor of node {source}")
        return self._arrived.pop(key)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        until_s = await self._port.now() + self._patience_s
        while not condition():
            left_s = until_s - await self._port.now()
            if left_s <= 0:
                raise TimedOut(self._port.world_rank, None, what, self._patience_s)
            await self._take(left_s)

    async def _taken(self, wait_s: float | None) -> tuple[int, Parcel] | None:
        """The next message that is of no stage."""
        until_s = None if wait_s is None else await self._port.now() + wait_s
        while not self._rest:
            left_s = None if until_s is None else max(0.0, until_s - await self._port.now())
            if not await self._take(left_s) and left_s is not None:
                return None
        return self._rest.popleft()

    async def _take(self, wait_s: float | None) -> bool:
        """Sort the next message; False if none comes in time."""
        taken = await self._port.take(wait_s)
        if taken is None:
            return False
        source, message = taken
        if not isinstance(message, StageTensor):
            self._rest.append(taken)
        elif source in self._nodes and message.incarnation == self._incarnation:
            self._arrived[(source, message.channel, message.tag), message.number] = message.value
        return True


async def through_stages(messages: StageMessages, program: Program[T]) -> T:
    """Meet the other processes of the replica, then run `program` and return its value."""
    try:
        await messages.meet()
    except BaseException:
        program.close()
        raise
    return await interpreted(program, messages.perform)
