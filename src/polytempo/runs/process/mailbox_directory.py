"""Mailboxes of processes that share a private folder. They find each other in it by node number.

shared   home/mail/n3           a socket in the run's private folder; tensors stay in shared memory
tcp      home/mail/n3.address   the address of node 3; encrypted with the keys in home/keys (mode 0600)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, get_args

from polytempo.server.message import Message
from polytempo.wire.frames import limits_of
from polytempo.wire.keys import make_keys, read_keys, write_keys
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox
from polytempo.worlds.process.mail import Mail

Transport = Literal["shared", "tcp"]
"""Shared memory and sockets without a port, or encrypted TCP on loopback, as between hosts."""

_LOOK_S = 0.05
"""The interval between two looks at a node's address."""
_IDLE_S = 60.0
"""A line without posts for so long is closed when another line is made: its node may be gone for good."""


class OpenMail(Mail, Protocol):
    """A process's mailbox."""

    def close(self, linger_s: float = 0.0) -> None:
        """Send posted messages for `linger_s`, and close."""


class MailboxDirectory:
    """Gives every process of the run in `home` its mailbox. Made in the launcher, before it forks.

    `most_bytes`: the largest tensors that any message carries, in all.
    """

    def __init__(self, home: Path, transport: Transport, arenas: Arenas | None, most_bytes: int) -> None:
        """`arenas` None: tensors travel through the sockets."""
        if transport not in get_args(Transport):
            raise ValueError(f"transport must be one of {', '.join(get_args(Transport))}, got {transport!r}")
        self._home, self._transport, self._arenas = home, transport, arenas
        self._limits = limits_of(most_bytes)

    def open(self) -> None:
        """Make the folder, and the keys of the run."""
        self._folder.mkdir(mode=0o700)
        if self._transport == "tcp":
            write_keys(self._home / "keys", make_keys())

    def mailbox(self, node: int, *, own_process: bool = False) -> NodeMail:
        """See `Mailboxes.mailbox`."""
        if self._transport == "shared":
            mail = Mailbox(node, self._socket(node), None, self._limits, references=self._arenas)
            return NodeMail(node, mail, self._socket, moves=False)
        keys = read_keys(self._home / "keys")
        mail = Mailbox(node, "tcp://127.0.0.1:*", keys, self._limits, keeps_memory=own_process)
        unfinished = self._folder / f"n{node}.{os.getpid()}"
        unfinished.write_text(mail.address)
        unfinished.replace(_address_file(self._folder, node))
        return NodeMail(node, mail, addresses_in(self._folder))

    @property
    def _folder(self) -> Path:
        return _folder_in(self._home)

    def _socket(self, node: int) -> str:
        return socket_in(self._home, node)


class NodeMail:
    """A mailbox that finds every other node by its number, also if that node is started again elsewhere.

    `find(node)` is its address, None as long as it has none. `moves`: addresses may change.
    """

    def __init__(self, node: int, mailbox: Mailbox, find: Callable[[int], str | None], *, moves: bool = True) -> None:
        self.node, self._mailbox, self._find, self._moves = node, mailbox, find, moves
        self._known: dict[int, str] = {}
        """Node -> its address."""
        self._looked_s: dict[int, float] = {}
        """Node -> time of the last look at its address."""
        self._posted_s: dict[int, float] = {}
        """Node -> time of the last post to it."""

    def post(self, to: int, message: Message) -> bool:
        """Send without waiting, to a node that may not be there yet."""
        return self._reaches(to) and self._mailbox.post(to, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message), or None if none comes in time."""
        return self._mailbox.take(wait_s)

    def close(self, linger_s: float = 0.0) -> None:
        """See `OpenMail`."""
        self._mailbox.close(linger_s)

    def _reaches(self, node: int) -> bool:
        now_s = time.monotonic()
        self._posted_s[node] = now_s
        if node in self._known and (not self._moves or now_s - self._looked_s[node] < _LOOK_S):
            return True
        self._looked_s[node] = now_s
        address = self._find(node)
        if address is None:
            return False
        if self._known.get(node) != address:
            self._forget_idle(now_s)
            self._mailbox.connect(node, address)
            self._known[node] = address
        return True

    def _forget_idle(self, now_s: float) -> None:
        """Each line costs a descriptor, and a copy of a shard that takes a lost one's place is another node."""
        for node in [node for node, posted_s in self._posted_s.items() if now_s - posted_s > _IDLE_S]:
            self._mailbox.forget(node)
            for facts in (self._known, self._looked_s, self._posted_s):
                facts.pop(node, None)


def addresses_in(folder: Path) -> Callable[[int], str | None]:
    """A function from a node to the address in its file; None without a file."""

    def find(node: int) -> str | None:
        try:
            return _address_file(folder, node).read_text()
        except FileNotFoundError:
            return None

    return find


def socket_in(home: Path, node: int) -> str:
    """The address of `node` if all processes have the folder `home`, and use no ports."""
    return f"ipc://{_folder_in(home)}/n{node}"


def _folder_in(home: Path) -> Path:
    return home / "mail"


def _address_file(folder: Path, node: int) -> Path:
    return folder / f"n{node}.address"
