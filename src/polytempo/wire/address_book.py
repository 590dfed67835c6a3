"""`AddressBook`: one node keeps the addresses of all, and every other node has a copy that follows it.

node 3     Here(place, version 0) ──▶ keeper          again until it is answered, and every few seconds
           ◀── Addresses since 0, version 5           all that it does not know yet
node 1     ◀── Addresses since 5, version 6           a place that has changed goes to all immediately

Both sides decide without I/O. Addresses travel through mailboxes, so only processes with the run's keys can write or
read them; a process knows the keeper's address and the keys from the engine that has started it.
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.server.message import Message, Outbox


class Place(NamedTuple):
    """The addresses of a node's mail."""

    node: int
    life: int
    """The number of its process among all of the run: a later life takes the place of an earlier one."""
    memory: int
    """Equal for processes that share memory; -1: it shares memory with no other process."""
    far: str
    """The address for all other processes."""
    near: str = ""
    """The address for processes that share its memory; empty: it has none."""

    def seen_from(self, memory: int) -> str:
        """The address for a process that has `memory`."""
        return self.near if self.near and memory == self.memory else self.far


class Here(Message, frozen=True, eq=False):
    """Message to the keeper: the sender is at `place`, and knows the book's `version`."""

    place: Place
    version: int


class Addresses(Message, frozen=True, eq=False):
    """The keeper's answer: the places that have changed after version `since`, up to `version`."""

    since: int
    version: int
    places: tuple[Place, ...]


class AddressBook:
    """The keeper's book."""

    def __init__(self) -> None:
        self.version = 0
        self._places: dict[int, tuple[int, Place]] = {}
        """Node -> its place, and the version of its entry."""

    def place_of(self, node: int) -> Place | None:
        """The place of the newest life of `node`; None before its first message."""
        found = self._places.get(node)
        return None if found is None else found[1]

    def receive(self, source: int, message: Here) -> Outbox:
        """The messages to send because `message` has come from node `source`. An earlier life gets no answer."""
        place = message.place
        known = self.place_of(source)
        if place.node != source or (known is not None and place.life < known.life):
            return []
        out: Outbox = []
        if place != known:
            before, self.version = self.version, self.version + 1
            self._places[source] = self.version, place
            news = Addresses(before, self.version, (place,))
            out += [(node, news) for node in self._places if node != source]
        later = tuple(other for version, other in self._places.values() if version > message.version)
        return [*out, (source, Addresses(message.version, self.version, later))]


class BookCopy:
    """Another node's copy of the book."""

    def __init__(self) -> None:
        self.version = 0
        """Every change up to this one is in the copy."""
        self.answered = False
        """True once the keeper has answered."""
        self._places: dict[int, Place] = {}

    def place_of(self, node: int) -> Place | None:
        """The place of `node`; None where it is not known here."""
        return self._places.get(node)

    def receive(self, message: Addresses) -> None:
        """Take over the keeper's news; of two lives of a node the later one stays, however messages arrive."""
        self.answered = True
        for place in message.places:
            known = self._places.get(place.node)
            if known is None or place.life >= known.life:
                self._places[place.node] = place
        if message.since <= self.version:
            self.version = max(self.version, message.version)
