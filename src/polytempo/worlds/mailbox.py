"""The mailboxes of a virtual world's nodes."""

from __future__ import annotations

from functools import partial
from math import inf

from polytempo.cluster.speeds import MESSAGE
from polytempo.core.kernel_use import KernelUse
from polytempo.core.op import Parcel, Post, Take
from polytempo.worlds.clockwork import Clockwork
from polytempo.worlds.network import Network, Passage
from polytempo.worlds.operations import Flight
from polytempo.worlds.processors import Processors
from polytempo.worlds.queues import MessageQueues


class NodeMailbox:
    """A mailbox for each of `num_nodes` nodes. What is posted to one that is closed vanishes without an error.

    A message travels as a send does: it takes the sender's end of the link, then the receiver's, and where that was
    measured the receiver's processor. It is not copied; who posts it leaves it unchanged.
    """

    def __init__(self, world: Clockwork, network: Network, processors: Processors, num_nodes: int) -> None:
        self._world, self._network, self._processors = world, network, processors
        self._open = set(range(num_nodes))
        self._boxes: MessageQueues[int, tuple[int, Parcel]] = MessageQueues()
        self._num_nodes = num_nodes
        self._handing: set[Flight] = set()
        """Those whose message has come, and whose processor works on it."""

    def post(self, flight: Flight, op: Post) -> None:
        """Send a message on its way; the operation is over when its last byte has left."""
        world, sender = self._world, flight.rank
        if not 0 <= op.to < self._num_nodes:
            wrong = ValueError(f"the world has nodes 0 to {self._num_nodes - 1}; there is no mailbox {op.to}")
            return world.at(world.now_s, lambda: world.end(flight, "post", 0, None, op.to, wrong))
        sent_bytes = op.message.num_bytes
        passage = self._network.send(sender, op.to, sent_bytes, world.now_s)
        world.at(passage.reaches_s, partial(self._begin_arrival, passage, op.to, (sender, op.message)))
        world.at(passage.left_s, partial(world.end, flight, "post", sent_bytes, None, op.to))

    def take(self, flight: Flight, op: Take) -> None:
        """Hand over the oldest message, or wait for one, as long as it is wanted."""
        world = self._world
        letter = self._boxes.ask(flight.rank, flight)
        if letter is not None:
            world.at(world.now_s, partial(self._hand_over, flight, letter))
        elif op.wait_s is not None and op.wait_s < inf:
            world.at(world.now_s + op.wait_s, partial(self._give_up, flight), deadline_of=flight)

    def close(self, node: int) -> None:
        """The node is gone, or has finished."""
        self._open.discard(node)
        self._boxes.clear(node)

    def _begin_arrival(self, passage: Passage, node: int, letter: tuple[int, Parcel]) -> None:
        """The first byte is there."""
        there_s = self._network.receive(passage, self._world.now_s)
        self._world.at(there_s, partial(self._deliver, node, letter))

    def _deliver(self, node: int, letter: tuple[int, Parcel]) -> None:
        if node in self._open:
            flight = self._boxes.arrive(node, letter)
            if flight is not None:
                self._hand_over(flight, letter)

    def _give_up(self, flight: Flight) -> None:
        """Nothing has come in time. A message that the processor works on has, and would be lost."""
        if flight not in self._handing:
            self._world.end(flight, "take", 0, None)

    def _hand_over(self, flight: Flight, letter: tuple[int, Parcel]) -> None:
        if not self._network.cluster.handles_messages:
            return self._world.end(flight, "take", 0, letter, letter[0])

        def over() -> None:
            self._handing.discard(flight)
            self._world.end(flight, "take", 0, letter, letter[0])

        self._handing.add(flight)
        self._processors.handle(flight.rank, KernelUse(MESSAGE, 1, letter[1].num_bytes), over)
