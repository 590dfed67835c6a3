"""`TwoEnds`: a node's mail by two ways at once, as one mailbox.

processes of this host ── files, tensors in shared memory ──▶ near ┐
processes of others    ── TCP, encrypted ──────────────────▶ far  ┴─▶ take
"""

from __future__ import annotations

import math
import time

import zmq

from polytempo.server.message import Message
from polytempo.wire.zeromq import Mailbox


class TwoEnds:
    """The mailboxes `near`, at an `ipc://` address or None, and `far`, of one node. It closes both."""

    def __init__(self, near: Mailbox | None, far: Mailbox) -> None:
        self.near, self.far = near, far
        self._ends: list[Mailbox] = [far] if near is None else [near, far]
        self._poller = zmq.Poller()
        for end in self._ends:
            self._poller.register(end.arrivals, zmq.POLLIN)
        self._ways: dict[int, Mailbox] = {}
        """Node -> the end by which mail leaves for it."""

    def connect(self, node: int, address: str) -> None:
        """Write to `node` at `address` from now on; a former line to it is closed, whichever way it went."""
        is_file = address.startswith("ipc://")
        if is_file and self.near is None:
            raise ValueError(f"{address} is a file of another host; this node has no mail by files")
        self.forget(node)
        end = self.near if is_file and self.near is not None else self.far
        end.connect(node, address)
        self._ways[node] = end

    def forget(self, node: int) -> None:
        """Close the line to `node`, with all that has not left."""
        end = self._ways.pop(node, None)
        if end is not None:
            end.forget(node)

    def post(self, to: int, message: Message) -> bool:
        """See `Mailbox.post`."""
        return self._ways.get(to, self.far).post(to, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message) of either end, or None if none comes within `wait_s`; the ends take turns."""
        until_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            for end in tuple(self._ends):
                mail = end.take(0.0)
                if mail is not None:
                    self._ends.remove(end)
                    self._ends.append(end)
                    return mail
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            self._poller.poll(None if left_s == math.inf else math.ceil(1e3 * left_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close both; messages that have not left get `linger_s` in all."""
        until_s = time.monotonic() + linger_s
        for end in self._ends:
            end.close(max(0.0, until_s - time.monotonic()))
