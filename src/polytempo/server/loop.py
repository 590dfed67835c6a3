"""`serve`: runs a machine of the parameter server in the world of its port."""

from __future__ import annotations

from typing import Protocol

from polytempo.core import Port
from polytempo.core.kernel_use import KernelUse
from polytempo.server.message import Message, Outbox

_SLACK_S = 1e-6
"""Added to each wait: by rounding, an event that is due in w seconds may not be due yet at now + w."""


class Machine(Protocol):
    """A copy of a shard (`Node`) or the `Coordinator`: decisions without I/O."""

    finished: bool

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The messages to send because `message` has come from node `source`."""

    def tick(self, now_s: float) -> Outbox:
        """The messages to send because time has passed."""

    def wait_s(self, now_s: float) -> float:
        """How long nothing is to be done unless something arrives."""

    def flops(self, message: Message) -> float:
        """The cost of receiving `message`, in floating-point operations."""


async def serve(port: Port, machine: Machine) -> None:
    """Take, decide, post, until the machine has finished. Each message is charged by `machine.flops`."""
    await _post(port, machine.tick(await port.now()))
    wait_s = machine.wait_s(await port.now())
    while not machine.finished:
        taken = await port.take(wait_s + _SLACK_S)
        if taken is not None and isinstance(taken[1], Message):
            await _post(port, await _received(port, machine, taken[0], taken[1]))
        now_s = await port.now()
        wait_s = machine.wait_s(now_s)
        if wait_s <= 0:
            await _post(port, machine.tick(now_s))
            wait_s = machine.wait_s(await port.now())


async def _received(port: Port, machine: Machine, source: int, message: Message) -> Outbox:
    now_s, flops = await port.now(), machine.flops(message)
    if not flops:
        return machine.receive(now_s, source, message)
    uses = (KernelUse("serve", 1, message.num_bytes, flops),)
    return await port.compute(lambda: machine.receive(now_s, source, message), flops, uses=uses)


async def _post(port: Port, out: Outbox) -> None:
    """Start to post without waiting: the machine takes its next message meanwhile. The world raises errors."""
    for to, message in out:
        await port.start(port.post(message, to))
