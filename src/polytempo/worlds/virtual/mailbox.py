"""The mailboxes of a virtual world's nodes, and the queues in which arrived messages meet waiting receivers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from functools import partial
from math import inf
from typing import Generic, TypeVar

from polytempo.cluster.speeds import MESSAGE
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.op import Dispatch, Parcel, Post, Take
from polytempo.worlds.virtual.clockwork import Clockwork
from polytempo.worlds.virtual.network import Network, Passage
from polytempo.worlds.virtual.processors import Processors
from polytempo.worlds.virtual.virtual_operations import Flight


class NodeMailbox:
    """A mailbox for each of `num_nodes` nodes. What is posted to one that is closed vanishes without an error.

    A message travels as a send does: it takes the sender's end of the link, then the receiver's, and where that was
    measured the receiver's processor. It is not copied; who posts it leaves it unchanged.
    """

    def __init__(self, world: Clockwork, network: Network, processors: Processors, num_nodes: int) -> None:
        self._world, self._network, self._processors = world, network, processors
        self._handles = network.cluster.handles_messages
        self._open = set(range(num_nodes))
        self._boxes: MessageQueues[int, tuple[int, Parcel]] = MessageQueues()
        self._num_nodes = num_nodes
        self._handing: set[Flight] = set()
        """Those whose message has come, and whose processor works on it."""

    def post(self, flight: Flight, op: Post) -> None:
        """Send a message on its way; the operation is over when its last byte has left."""
        world, sender = self._world, flight.rank
        try:
            self._check(op.to)
        except ValueError as error:
            return world.at(world.now_s, partial(world.end, flight, "post", 0, None, op.to, error))
        sent_bytes, left_s = self._send(sender, op.to, op.message)
        world.at(left_s, partial(world.end, flight, "post", sent_bytes, None, op.to))

    def dispatch(self, sender: int, step: int, op: Dispatch) -> None:
        """Send messages on their way, for which nothing waits."""
        world = self._world
        for to, message in op.messages:
            self._check(to)
            sent_bytes, left_s = self._send(sender, to, message)
            world.at(left_s, partial(world.write, (sender, step, "post", sent_bytes, world.now_s, left_s, to)))

    def take(self, flight: Flight, op: Take) -> None:
        """Hand over the oldest message, or wait for one, as long as it is wanted."""
        world = self._world
        letter = self._boxes.ask(flight.rank, flight)
        if letter is not None:
            world.at(world.now_s, partial(self._hand_over, flight, letter))
        elif op.wait_s is not None and op.wait_s < inf:
            world.at_deadline(world.now_s + op.wait_s, flight, partial(self._give_up, flight))

    def close(self, node: int) -> None:
        """The node is gone, or has finished."""
        self._open.discard(node)
        self._boxes.clear(node)

    def _check(self, node: int) -> None:
        if not 0 <= node < self._num_nodes:
            raise ValueError(f"the world has nodes 0 to {self._num_nodes - 1}; there is no mailbox {node}")

    def _send(self, sender: int, to: int, message: Parcel) -> tuple[int, float]:
        """Its bytes, and when the last of them leaves."""
        sent_bytes = message.num_bytes
        passage = self._network.send(sender, to, sent_bytes, self._world.now_s)
        self._world.at(passage.reaches_s, partial(self._begin_arrival, passage, to, (sender, message)))
        return sent_bytes, passage.left_s

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
        if not self._handles:
            return self._world.end(flight, "take", 0, letter, letter[0])

        def over() -> None:
            self._handing.discard(flight)
            self._world.end(flight, "take", 0, letter, letter[0])

        self._handing.add(flight)
        self._processors.handle(flight.rank, KernelUse(MESSAGE, 1, letter[1].num_bytes), over)


Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class MessageQueues(Generic[Key, Item]):
    """For each key what has arrived unasked, or the ranks that have asked before it arrives.

    Both are served first come, first served.
    """

    def __init__(self) -> None:
        self._arrived: dict[Key, deque[Item]] = defaultdict(deque)
        self._asking: dict[Key, deque[Flight]] = defaultdict(deque)

    def ask(self, key: Key, flight: Flight) -> Item | None:
        """The oldest that has arrived; None: `flight` waits from now on."""
        if arrived := self._arrived.get(key):
            return arrived.popleft()
        self._asking[key].append(flight)
        return None

    def arrive(self, key: Key, item: Item) -> Flight | None:
        """Who has waited longest for `item`; None: it waits itself."""
        asking = self._asking.get(key)
        while asking:
            flight = asking.popleft()
            if not flight.done:
                return flight
        self._arrived[key].append(item)
        return None

    def asking(self) -> Iterator[tuple[Key, Flight]]:
        """Everyone who waits, with the key."""
        return ((key, flight) for key, flights in self._asking.items() for flight in flights)

    def clear(self, key: Key) -> None:
        """Forget what has arrived and who has asked."""
        self._arrived.pop(key, None)
        self._asking.pop(key, None)
