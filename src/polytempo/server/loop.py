"""`serve`: a machine of the parameter server, driven by whatever world its port belongs to."""

from __future__ import annotations

from typing import Protocol

from polytempo.core import Port
from polytempo.server.message import Message, Outbox

_SLACK_S = 1e-6
"""Added to each wait: what is due in w seconds may, by rounding, not be due yet at now + w."""


class Machine(Protocol):
    """A copy of a shard (`Node`) or the `Coordinator`: decisions without I/O."""

    finished: bool

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """What is to be sent because `message` has come from node `source`."""

    def tick(self, now_s: float) -> Outbox:
        """What is to be sent because time has passed."""

    def wait_s(self, now_s: float) -> float:
        """How long nothing is to be done unless something arrives."""

    def flops(self, message: Message) -> float:
        """What taking `message` costs, in floating-point operations."""


async def serve(port: Port, machine: Machine) -> None:
    """Take, decide, post, until the machine has finished. Work on messages is charged as the machine prices it."""
    await _post(port, machine.tick(await port.now()))
    while not machine.finished:
        taken = await port.take(machine.wait_s(await port.now()) + _SLACK_S)
        if taken is not None and isinstance(taken[1], Message):
            await _post(port, await _received(port, machine, taken[0], taken[1]))
        now_s = await port.now()
        if machine.wait_s(now_s) <= 0:
            await _post(port, machine.tick(now_s))


async def _received(port: Port, machine: Machine, source: int, message: Message) -> Outbox:
    now_s, flops = await port.now(), machine.flops(message)
    if not flops:
        return machine.receive(now_s, source, message)
    return await port.compute(lambda: machine.receive(now_s, source, message), flops)


async def _post(port: Port, out: Outbox) -> None:
    """Nobody waits for a message to have left: the next request is looked at meanwhile. The world raises errors."""
    for to, message in out:
        await port.start(port.post(message, to))
