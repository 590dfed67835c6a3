"""How the processes of a run find each other's mailboxes, by node number.

shared   home/mail/n3           a socket in the run's private folder; tensors stay in shared memory
tcp      home/mail/n3.address   where node 3 listens; encrypted with the keys in home/keys (mode 0600)
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal, get_args

from polytempo.server.message import Message
from polytempo.wire.frames import FrameLimits
from polytempo.wire.keys import make_keys, read_keys, write_keys
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox

Transport = Literal["shared", "tcp"]
"""Shared memory and sockets without a port, or encrypted TCP on loopback, as between hosts."""

_HEADROOM_BYTES = 16 << 20
_LOOK_S = 0.05
"""How often it is looked whether a node listens elsewhere by now."""


class MailboxDirectory:
    """Gives every process of the run in `home` its mailbox. Made in the launcher, before it forks.

    `most_bytes`: the largest tensors that any message carries, in all.
    """

    def __init__(self, home: Path, transport: Transport, arenas: Arenas, most_bytes: int) -> None:
        if transport not in get_args(Transport):
            raise ValueError(f"transport must be one of {', '.join(get_args(Transport))}, got {transport!r}")
        self._home, self._transport, self._arenas = home, transport, arenas
        self._limits = FrameLimits(total_bytes=most_bytes + _HEADROOM_BYTES)

    def open(self) -> None:
        """Make the folder, and the keys of the run."""
        self._folder.mkdir(mode=0o700)
        if self._transport == "tcp":
            write_keys(self._home / "keys", make_keys())

    def mailbox(self, node: int, *, own_process: bool = False) -> NodeMail:
        """The mailbox of `node`, in the process that is it.

        `own_process`: this process is nothing else than that node, and may keep its memory (see `wire.memory`). The
        coordinator's is the user's own.
        """
        if self._transport == "shared":
            return NodeMail(
                node,
                self._folder,
                Mailbox(node, f"ipc://{self._folder}/n{node}", None, self._limits, references=self._arenas),
            )
        keys = read_keys(self._home / "keys")
        mail = Mailbox(node, "tcp://127.0.0.1:*", keys, self._limits, keeps_memory=own_process)
        unfinished = self._folder / f"n{node}.{os.getpid()}"
        unfinished.write_text(mail.address)
        unfinished.replace(_address_file(self._folder, node))
        return NodeMail(node, self._folder, mail, by_file=True)

    @property
    def _folder(self) -> Path:
        return self._home / "mail"


class NodeMail:
    """A mailbox that finds every other node's by its number, also when that node is started anew elsewhere."""

    def __init__(self, node: int, folder: Path, mailbox: Mailbox, *, by_file: bool = False) -> None:
        self.node, self._folder, self._mailbox, self._by_file = node, folder, mailbox, by_file
        self._known: dict[int, int] = {}
        """Node -> when its address was written (0: it needs no file)."""
        self._looked_s: dict[int, float] = {}
        """Node -> when its address was last looked at."""

    def post(self, to: int, message: Message) -> bool:
        """Send without waiting, to a node that may not be there yet."""
        return self._reaches(to) and self._mailbox.post(to, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message), or None if none comes in time."""
        return self._mailbox.take(wait_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Let what was posted leave, and close."""
        self._mailbox.close(linger_s)

    def _reaches(self, node: int) -> bool:
        if not self._by_file:
            if node not in self._known:
                self._mailbox.connect(node, f"ipc://{self._folder}/n{node}")
                self._known[node] = 0
            return True
        now_s = time.monotonic()
        if node in self._known and now_s - self._looked_s[node] < _LOOK_S:
            return True
        self._looked_s[node] = now_s
        file = _address_file(self._folder, node)
        try:
            written = file.stat().st_mtime_ns
            if self._known.get(node) != written:
                self._mailbox.connect(node, file.read_text())
                self._known[node] = written
        except FileNotFoundError:
            return False
        return True


def _address_file(folder: Path, node: int) -> Path:
    return folder / f"n{node}.address"
