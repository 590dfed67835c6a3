"""The messages between ranks of a virtual world, from a send to the receive that takes it.

Where it was measured what a processor does for a message that a rank receives (the kernel `message`: to copy it where
it belongs, or to add it), a receive is over after that. So ranks that compute receive nothing meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from polytempo.cluster.speeds import MESSAGE
from polytempo.core import Mismatch
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.op import Recv, Send
from polytempo.worlds.collective import num_bytes
from polytempo.worlds.virtual.clockwork import Clockwork
from polytempo.worlds.virtual.mailbox import MessageQueues
from polytempo.worlds.virtual.network import Network
from polytempo.worlds.virtual.processors import Processors
from polytempo.worlds.virtual.virtual_operations import Flight


class Line(NamedTuple):
    """What messages match by. Those of one line are received in the order of sending."""

    source: int
    to: int
    channel: int
    tag: int


class Messages:
    """All messages of a world. `unreceived` counts those that no receive has taken."""

    def __init__(self, world: Clockwork, network: Network, processors: Processors) -> None:
        self._world, self._network, self._processors = world, network, processors
        self._sent: MessageQueues[Line, Tensor] = MessageQueues()
        self.unreceived = 0

    def send(self, flight: Flight, op: Send) -> None:
        """Send a copy of the buffer on its way; the operation is over when its last byte has left."""
        world, rank = self._world, flight.rank
        if op.to in world.lost:
            return world.fail(flight, op.to)
        payload = op.buffer if op.buffer.is_meta else op.buffer.detach().clone()
        sent_bytes = num_bytes(payload)
        passage = self._network.send(rank, op.to, sent_bytes, world.now_s)
        line = Line(rank, op.to, op.channel, op.tag)
        self.unreceived += 1

        def first_byte_arrives() -> None:
            world.at(self._network.receive(passage, world.now_s), lambda: self._deliver(line, payload))

        world.at(passage.reaches_s, first_byte_arrives)
        world.at(passage.left_s, lambda: world.end(flight, "send", sent_bytes, None, op.to))

    def recv(self, flight: Flight, op: Recv) -> None:
        """Take the oldest message of the line, or wait for one."""
        world = self._world
        payload = self._sent.ask(Line(op.source, flight.rank, op.channel, op.tag), flight)
        if payload is not None:
            world.at(world.now_s, lambda: self._hand_over(flight, payload))
        elif op.source in world.lost:  # what it sent before may still arrive in time
            world.fail(flight, op.source)

    def lose(self, rank: int) -> None:
        """`rank` is gone: fail the receives that wait for it."""
        for line, flight in self._sent.asking():
            if line.source == rank:
                self._world.fail(flight, rank)

    def _deliver(self, line: Line, payload: Tensor) -> None:
        flight = self._sent.arrive(line, payload)
        if flight is not None:
            self._hand_over(flight, payload)

    def _hand_over(self, flight: Flight, payload: Tensor) -> None:
        op = flight.op
        assert isinstance(op, Recv)
        self.unreceived -= 1
        if payload.shape != op.like.shape or payload.dtype != op.like.dtype:
            wrong = Mismatch(
                f"rank {flight.rank}, step {flight.step}: rank {op.source} sent "
                f"{tuple(payload.shape)} {payload.dtype}, but {tuple(op.like.shape)} {op.like.dtype} was expected"
            )
            return self._world.land(flight, None, wrong)
        source = op.source
        if not self._network.cluster.handles_messages:
            return self._world.end(flight, "recv", 0, payload, source)
        use = KernelUse(MESSAGE, 1, num_bytes(payload))
        self._processors.handle(flight.rank, use, lambda: self._world.end(flight, "recv", 0, payload, source))
