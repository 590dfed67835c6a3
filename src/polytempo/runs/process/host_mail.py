"""Mailboxes of a run's processes on several hosts, which find each other by the coordinator's address book.

launcher   KeeperMail: the coordinator's mailbox, and the book          its address and the keys come with each order
host 1     worker 0 ◀─ files, shared memory ─▶ shard 0
              ▲ TCP, encrypted                                          chosen by `Place.seen_from`
host 2     shard 1

A process that forks the others of its host makes their shared memory (`HostMemory`). Without it all mail of a process
goes over TCP.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from polytempo.runs.process.mailbox_directory import OpenMail
from polytempo.server.message import Message
from polytempo.wire.address_book import AddressBook, Addresses, BookCopy, Here, Place
from polytempo.wire.frames import limits_of
from polytempo.wire.keys import Keys
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox, MailCounts, TwoEnds

_ASK_S = 0.25
"""A process sends its address at this interval until the keeper has answered, and requests for unknown nodes."""
_REPAIR_S = 2.0
"""The interval of requests for changes: the message about a change may have been lost with a connection."""
_MOST_HELD = 16


class HostMemory(NamedTuple):
    """The memory and folder that the processes of one parent share, made before they are forked."""

    number: int
    """A number of these processes only."""
    folder: Path
    """A private folder (mode 0700) for their sockets."""
    arenas: Arenas


def host_memory(setting: Mapping[str, Any], number: int, home: Path) -> HostMemory | None:
    """The memory, and a folder in `home`, for the run of `setting`; None if its processes share no memory."""
    wanted = setting.get("memory")
    if wanted is None:
        return None
    folder = home / "mail"
    folder.mkdir(mode=0o700)
    return HostMemory(number, folder, Arenas(wanted["arenas"], wanted["bytes"]))


class Ends(OpenMail, Protocol):
    """The mailbox below a node's mail: `TwoEnds`, or a `Mailbox`."""

    def connect(self, node: int, address: str) -> None:
        """Set the address of `node`."""


class KeeperMail:
    """The coordinator's mailbox at `host`, with the address book of all nodes, which takes messages about addresses."""

    def __init__(self, node: int, host: str, keys: Keys, most_bytes: int) -> None:
        self._mail = Mailbox(node, f"tcp://{host}:*", keys, limits_of(most_bytes))
        self._node, self._lines, self._book = node, _Lines(self._mail), AddressBook()
        self.address = self._mail.address

    @property
    def counts(self) -> MailCounts:
        """Counts of received, sent and refused messages."""
        return self._mail.counts

    def mailbox(self, node: int, *, own_process: bool = False) -> KeeperMail:
        """See `Mailboxes.mailbox`."""
        assert node == self._node, f"this is the mailbox of node {self._node}"
        return self

    def post(self, to: int, message: Message) -> bool:
        """Send without waiting, to a node that may not be there yet."""
        place = self._book.place_of(to)
        return place is not None and self._lines.post(to, place.far, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message), or None if none comes in time."""
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            mail = self._mail.take(_left_s(until_s))
            if mail is None or not isinstance(mail[1], Here):
                return mail
            for to, answer in self._book.receive(*mail):  # type: ignore[arg-type]
                self.post(to, answer)

    def close(self, linger_s: float = 0.0) -> None:
        """See `OpenMail`."""
        self._mail.close(linger_s)


class HostMailboxes:
    """Gives the process in its life `life`, at `host`, its mailbox. `keeper`: the coordinator's node and address."""

    def __init__(
        self,
        life: int,
        host: str,
        keys: Keys,
        most_bytes: int,
        keeper: tuple[int, str],
        memory: HostMemory | None = None,
    ) -> None:
        self._life, self._host, self._keys, self._keeper, self._memory = life, host, keys, keeper, memory
        self._limits = limits_of(most_bytes)

    def mailbox(self, node: int, *, own_process: bool = False) -> BookMail:
        """See `Mailboxes.mailbox`."""
        far = Mailbox(node, f"tcp://{self._host}:*", self._keys, self._limits, keeps_memory=own_process)
        memory, near = self._memory, None
        if memory is not None:
            path = memory.folder / f"m{self._life}"
            near = Mailbox(node, f"ipc://{path}", None, self._limits, references=memory.arenas)
        place = Place(
            node,
            self._life,
            -1 if memory is None else memory.number,
            far.address,
            "" if near is None else near.address,
        )
        return BookMail(place, TwoEnds(near, far), self._keeper)


class BookMail:
    """The mail of the node at `place`, which finds the others by a copy of the keeper's book."""

    def __init__(self, place: Place, ends: Ends, keeper: tuple[int, str]) -> None:
        self.place, self._lines, self._book = place, _Lines(ends), BookCopy()
        self._keeper, self._keeper_address = keeper
        self._asked_s = -math.inf
        self._held: dict[int, deque[Message]] = {}
        """Node -> messages that wait for its address."""
        self._ask()

    def post(self, to: int, message: Message) -> bool:
        """Send without waiting. The last few messages to a node that is not there yet leave when it is."""
        address = self._address_of(to)
        if address is None:
            self._held.setdefault(to, deque(maxlen=_MOST_HELD)).append(message)
            self._ask_after(_ASK_S)
            return True
        return self._lines.post(to, address, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message), or None if none comes in time."""
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            pause_s = _REPAIR_S if self._book.answered else _ASK_S
            self._ask_after(pause_s)
            wake_s = self._asked_s + pause_s
            mail = self._lines.ends.take(_left_s(min(until_s, wake_s)))
            if mail is None:
                if time.monotonic() >= until_s:
                    return None
            elif not isinstance(mail[1], Addresses):
                return mail
            elif mail[0] == self._keeper:
                self._book.receive(mail[1])
                self._release()

    def close(self, linger_s: float = 0.0) -> None:
        """See `OpenMail`."""
        self._lines.ends.close(linger_s)

    def _address_of(self, node: int) -> str | None:
        if node == self._keeper:
            return self._keeper_address
        place = self._book.place_of(node)
        return None if place is None else place.seen_from(self.place.memory)

    def _release(self) -> None:
        for to in list(self._held):
            if (address := self._address_of(to)) is not None:
                for message in self._held.pop(to):
                    self._lines.post(to, address, message)

    def _ask_after(self, pause_s: float) -> None:
        if time.monotonic() - self._asked_s >= pause_s:
            self._ask()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self._lines.post(self._keeper, self._keeper_address, Here(self.place, self._book.version))


class _Lines:
    """The lines of a mailbox, each made when it is first needed, and again when a node has another address."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self._known: dict[int, str] = {}

    def post(self, to: int, address: str, message: Message) -> bool:
        if self._known.get(to) != address:
            self.ends.connect(to, address)
            self._known[to] = address
        return self.ends.post(to, message)


def _left_s(until_s: float) -> float | None:
    return None if until_s == math.inf else max(0.0, until_s - time.monotonic())
