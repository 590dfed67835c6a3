"""The messages of a virtual world: between ranks, from a send to the receive that takes it, and to nodes' mailboxes.

A receive includes the processor's work on the message, where that was measured (the kernel `message`: to copy it where
it belongs, or to add it). So ranks that compute receive nothing meanwhile.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from math import inf
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from polytempo.cluster.computing_time import MESSAGE
from polytempo.core import Mismatch
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.op import Dispatch, Parcel, Post, Recv, Send, Take
from polytempo.worlds.collective import num_bytes
from polytempo.worlds.virtual.clockwork import Clockwork, Flight
from polytempo.worlds.virtual.network import Network
from polytempo.worlds.virtual.processors import Processors

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class MessageQueues(Generic[Key, Item]):
    """The arrived items of each key that no rank has asked for, or the ranks that ask before one arrives.

    Both are served first come, first served.
    """

    def __init__(self) -> None:
        self._arrived: dict[Key, deque[Item]] = defaultdict(deque)
        self._asking: dict[Key, deque[Flight]] = defaultdict(deque)

    def ask(self, key: Key, flight: Flight) -> Item | None:
        """The oldest arrived item; None: `flight` waits from now on."""
        if arrived := self._arrived.get(key):
            return arrived.popleft()
        self._asking[key].append(flight)
        return None

    def arrive(self, key: Key, item: Item) -> Flight | None:
        """The operation that has waited longest for `item`; None: the item waits."""
        asking = self._asking.get(key)
        while asking:
            flight = asking.popleft()
            if not flight.done:
                return flight
        self._arrived[key].append(item)
        return None

    def asking(self) -> Iterator[tuple[Key, Flight]]:
        """All waiting operations, with the key."""
        return ((key, flight) for key, flights in self._asking.items() for flight in flights)

    def clear(self, key: Key) -> None:
        """Forget arrived items and waiting operations."""
        self._arrived.pop(key, None)
        self._asking.pop(key, None)


def _travel(
    world: Clockwork, network: Network, sender: int, to: int, sent_bytes: int, deliver: Callable[[], None]
) -> float:
    """Send bytes on their way, and call `deliver` when the last one is there; returns when it leaves."""
    passage = network.send(sender, to, sent_bytes, world.now_s)
    world.at(passage.reaches_s, lambda: world.at(network.receive(passage, world.now_s), deliver))
    return passage.left_s


class Line(NamedTuple):
    """The address of messages. Messages of one line are received in the order of sending."""

    source: int
    to: int
    channel: int
    tag: int


class Messages:
    """All messages of a world. `unreceived` counts messages that no receive has taken."""

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
        line = Line(rank, op.to, op.channel, op.tag)
        self.unreceived += 1
        left_s = _travel(world, self._network, rank, op.to, sent_bytes, partial(self._deliver, line, payload))
        world.at(left_s, lambda: world.end(flight, "send", sent_bytes, None, op.to))

    def recv(self, flight: Flight, op: Recv) -> None:
        """Take the oldest message of the line, or wait for one."""
        world = self._world
        payload = self._sent.ask(Line(op.source, flight.rank, op.channel, op.tag), flight)
        if payload is not None:
            world.at(world.now_s, lambda: self._hand_over(flight, payload))
        elif op.source in world.lost:  # an earlier message may still arrive in time
            world.fail(flight, op.source)

    def lose(self, rank: int) -> None:
        """Fail the receives that wait for a lost rank."""
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


class NodeMailbox:
    """A mailbox for each of `num_nodes` nodes. A message to a closed mailbox vanishes without an error.

    A message travels as a send does: it takes the sender's end of the link, then the receiver's, and where that was
    measured the receiver's processor. It is not copied; the sender leaves it unchanged.
    """

    def __init__(self, world: Clockwork, network: Network, processors: Processors, num_nodes: int) -> None:
        self._world, self._network, self._processors = world, network, processors
        self._handles = network.cluster.handles_messages
        self._open = set(range(num_nodes))
        self._boxes: MessageQueues[int, tuple[int, Parcel]] = MessageQueues()
        self._num_nodes = num_nodes
        self._handing: set[Flight] = set()
        """Operations with a message that the processor works on."""

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
        """Send messages on their way; nothing waits for them."""
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
        """Close the mailbox of a node that is gone, or has finished."""
        self._open.discard(node)
        self._boxes.clear(node)

    def _check(self, node: int) -> None:
        if not 0 <= node < self._num_nodes:
            raise ValueError(f"the world has nodes 0 to {self._num_nodes - 1}; there is no mailbox {node}")

    def _send(self, sender: int, to: int, message: Parcel) -> tuple[int, float]:
        sent_bytes, deliver = message.num_bytes, partial(self._deliver, to, (sender, message))
        return sent_bytes, _travel(self._world, self._network, sender, to, sent_bytes, deliver)

    def _deliver(self, node: int, letter: tuple[int, Parcel]) -> None:
        if node in self._open:
            flight = self._boxes.arrive(node, letter)
            if flight is not None:
                self._hand_over(flight, letter)

    def _give_up(self, flight: Flight) -> None:
        """End without a message, unless the processor works on one, which would be lost."""
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
