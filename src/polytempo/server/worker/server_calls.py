"""`through`: a worker's program, with its pushes and pulls performed by messages.

    program ──▶ Push, Pull, Take ──▶ through ──▶ Post, Take ──▶ world
            ──▶ everything else ───────────────────────────────▶ world

The program's own `Take` gets messages for others than the client: the coordinator's deals, peers' messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from polytempo.core import Op, Port, Program, interpreted
from polytempo.core.op import Parcel, Pull, Push, Start, Take, Work
from polytempo.device import HOST, DeviceCopy, HostCopy, on_accelerator
from polytempo.server.message import Outbox, Reply, View
from polytempo.server.worker.client import Client
from polytempo.server.worker.host.host_peers import Offer, Presence
from polytempo.server.worker.next_push import PendingExchange

T = TypeVar("T")

_FOR_CLIENT = (Reply, View, Offer, Presence)
_MOST_MAIL = 4096
"""The most messages kept for the program; older ones are lost, as on a network, and asked for again."""
_INSTANT_S = 1e-6
"""Slept longer than asked for: a sleep that ends a rounding error too early would be repeated for ever."""


def _nothing() -> None:
    """Nothing."""


def through(
    client: Client,
    port: Port,
    program: Program[T],
    device: torch.device = HOST,
    before_push: Callable[[], None] = _nothing,
) -> Program[T]:
    """`program` with its exchanges. A client has one program; coroutines that it starts cannot push.

    `device` and `before_push`: as of `ServerCalls`.
    """
    calls = ServerCalls(client, port, device, before_push)
    return interpreted(program, calls.perform, (Push, Pull, Start, Work, Take))


class ServerCalls:
    """The mailbox of a worker: the client's part, and the rest. One client has one of these.

    `device`: of the program's tensors. The client's are on the host. The host waits for the copy of a push, and then
    calls `before_push`; an answer is copied behind the device's work under way, and the host goes on.
    """

    def __init__(
        self, client: Client, port: Port, device: torch.device = HOST, before_push: Callable[[], None] = _nothing
    ) -> None:
        self._client, self._port, self._device, self.before_push = client, port, device, before_push
        self._copies: deque[DeviceCopy] = deque(maxlen=2)
        """The last answers, which the device may still read from the host."""
        self._rest: deque[tuple[int, Parcel]] = deque(maxlen=_MOST_MAIL)

    def perform(self, op: Op[Any]) -> Awaitable[Any]:
        """Answer an operation of the program."""
        match op:
            case Push() | Pull():
                return self._exchanged(op)
            case Start(Push() | Pull() as what):
                return self._started(what)
            case Work(PendingExchange() as pending):
                return self.finished(pending)
            case Take(wait_s):
                return self.taken(wait_s)
        return op

    async def _exchanged(self, op: Push | Pull) -> Any:
        return await self.finished(await self.begun(op))

    async def _started(self, op: Push | Pull) -> Work[Any]:
        return Work(await self.begun(op))

    async def begun(self, op: Push | Pull) -> PendingExchange:
        """Send a push or pull on its way."""
        client = self._client
        if flops := client.flops(pushes=isinstance(op, Push)):
            await self._port.compute(lambda: None, flops)  # the time that the codec takes on the virtual clock
        unread = client.meets or not client.idle  # an answer may open the line, and others may have offered
        while unread and (taken := await self._port.take(0.0)) is not None:
            await self._post(self._sort(await self._port.now(), *taken))
        if isinstance(op, Push):
            pending = client.push(self._on_host(op.gradient), op.clock, op.samples)
        else:
            pending = client.pull(op.clock)
        await self._post(client.outbox(await self._port.now()))
        if client.gathers:
            await self._until(lambda: not client.gathers, None)
        return pending

    async def finished(self, pending: PendingExchange) -> Any:
        """Wait for a push or pull."""
        await self._until(lambda: pending.done, None)
        value = pending.value
        if value is None or self._device.type in ("cpu", "meta"):
            return value
        self._copies.append(DeviceCopy(value, self._device))
        return self._copies[-1].tensor

    def _on_host(self, flat: Tensor) -> Tensor:
        if not on_accelerator(flat):
            return flat
        [copy] = HostCopy([flat]).wait()
        self.before_push()
        return copy

    async def taken(self, wait_s: float | None) -> tuple[int, Parcel] | None:
        """The next message that is not the client's."""
        if self._client.meets:  # it may have to say that it has nothing to push
            await self._post(self._client.outbox(await self._port.now()))
        await self._until(lambda: bool(self._rest), wait_s)
        return self._rest.popleft() if self._rest else None

    async def _until(self, condition: Callable[[], bool], wait_s: float | None) -> None:
        """Take messages until `condition()` holds, at most for `wait_s`."""
        client, port = self._client, self._port
        now_s = await port.now()
        until_s = None if wait_s is None else now_s + wait_s
        while not condition():
            patience_s = client.wait_s(now_s)
            if until_s is not None:
                patience_s = min(patience_s, until_s - now_s)
            taken = await port.take(patience_s + _INSTANT_S if patience_s > 0 else 0.0)
            now_s = await port.now()
            out = [] if taken is None else self._sort(now_s, *taken)
            if out:
                await self._post(out)
            if taken is None or client.is_due(now_s):
                late = client.tick(now_s, all_read=taken is None)
                await self._post(late)
                out += late
            if taken is None and until_s is not None and now_s >= until_s:
                return
            if out:
                now_s = await port.now()  # to post takes time

    def _sort(self, now_s: float, source: int, message: Parcel) -> Outbox:
        """Give a message to the client and return its answer, or put it aside for the program."""
        if isinstance(message, _FOR_CLIENT):
            return self._client.receive(now_s, source, message)
        self._rest.append((source, message))
        return []

    async def _post(self, out: Outbox) -> None:
        for to, message in out:
            await self._port.post(message, to)
