"""`serve`: runs a machine of the parameter server in the world of its port."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from polytempo.core import Port
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.server.message import Message, Outbox

_SLACK_S = 1e-6
"""Added to each wait: by rounding, an event that is due in w seconds may not be due yet at now + w."""


class Machine(Protocol):
    """A copy of a shard (`Node`) or the `Coordinator`: decisions without I/O."""

    @property
    def finished(self) -> bool:
        """True if the machine takes no more messages."""

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The messages to send because `message` has come from node `source`."""

    def tick(self, now_s: float) -> Outbox:
        """The messages to send because time has passed."""

    def wait_s(self, now_s: float) -> float:
        """The time until the next `tick`, unless a message arrives."""

    def flops(self, message: Message) -> float:
        """The cost of receiving `message`, in floating-point operations."""


async def serve(port: Port, machine: Machine) -> None:
    """Take, decide, post, until the machine has finished. Each message is charged by `machine.flops`.

    Nothing waits until a message has left: the machine takes its next one meanwhile.
    """
    now_s = await port.now()
    if out := machine.tick(now_s):
        await port.dispatch(out)
    wait_s = machine.wait_s(now_s)
    while not machine.finished:
        taken = await port.take(wait_s + _SLACK_S)
        now_s = await port.now()
        source, message = taken or (0, None)
        if isinstance(message, Message):
            flops = machine.flops(message)
            if flops:
                uses = (KernelUse("serve", 1, message.num_bytes, flops),)
                out = await port.compute(partial(machine.receive, now_s, source, message), flops, uses=uses)
            else:
                out = machine.receive(now_s, source, message)
            if out:
                await port.dispatch(out)
            if out or flops:
                now_s = await port.now()
        wait_s = machine.wait_s(now_s)
        if wait_s <= 0:
            if out := machine.tick(now_s):
                await port.dispatch(out)
            wait_s = machine.wait_s(await port.now())
