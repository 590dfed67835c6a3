"""`MessageQueues`: where what has arrived in a virtual world meets what waits for it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from polytempo.worlds.virtual.virtual_operations import Flight

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
