"""Bugs of replication, fencing and retrying: the node, the client, and its requests."""

from __future__ import annotations

from typing import Any

import msgspec

from polytempo.server.message import AskedEntry, Entry, Install, Outbox, Pushed, Replicate, Replicated, Request, View
from polytempo.server.requests import Requests
from polytempo.server.shard.node import Node
from polytempo.server.worker.client import Client

Patches = list[tuple[Any, str, Any]]


def acknowledged_before_replicated() -> Patches:
    """The head answers as soon as it has applied an entry itself."""
    append = Node._append

    def wrong(self: Node, now_s: float, entry: Entry) -> Outbox:
        out = append(self, now_s, entry)
        if self._successor is not None and self._held and self._held[-1][0] == self.index:
            out += self._addressed(self._held.pop()[1])
        return out

    return [(Node, "_append", wrong)]


def repeat_answered_before_replicated() -> Patches:
    """A request that comes again is answered from the table, although its entry is not replicated yet."""
    request_ = Node._request

    def wrong(self: Node, now_s: float, request: AskedEntry) -> Outbox:
        status = self.shard.status_of(request)
        if status.kind == "new":
            return request_(self, now_s, request)
        return self._addressed(status.replies)

    return [(Node, "_request", wrong)]


def no_fence() -> Patches:
    """A copy takes entries and confirmations from any sender and of any epoch."""
    replicate, confirmed = Node._replicate, Node._confirmed

    def replicated(self: Node, now_s: float, source: int, message: Replicate) -> Outbox:
        if self.blank or message.index > self.index + 1:
            return []
        if message.epoch == self.epoch and source == self._predecessor:
            return replicate(self, now_s, source, message)
        if message.index == self.index + 1:
            self._apply(message.entry)
            self.committed = self.index
        return [(source, Replicated(self.shard.number, message.epoch, message.index))]

    def confirms(self: Node, now_s: float, source: int, message: Replicated) -> Outbox:
        return confirmed(self, now_s, source, msgspec.structs.replace(message, epoch=self.epoch))

    return [(Node, "_replicate", replicated), (Node, "_confirmed", confirms)]


def confirmed_too_much() -> Patches:
    """The head takes all its entries for confirmed, though the next copy has confirmed only some."""
    confirmed = Node._confirmed

    def wrong(self: Node, now_s: float, source: int, message: Replicated) -> Outbox:
        if message.index > self.committed:
            message = msgspec.structs.replace(message, index=self.index)
        return confirmed(self, now_s, source, message)

    return [(Node, "_confirmed", wrong)]


def deposed_head_answers() -> Patches:
    """A head that is deposed sends the replies that it has kept back."""
    see = Node._see

    def wrong(self: Node, now_s: float, view: View) -> Outbox:
        held = [reply for _, replies in self._held for reply in replies]
        out = see(self, now_s, view)
        return out if self.node in self.chain else out + self._addressed(held)

    return [(Node, "_see", wrong)]


def two_heads() -> Patches:
    """Every copy in the chain answers workers, not the first one only."""

    def wrong(self: Node) -> bool:
        return self.node in self.chain and not self.blank

    return [(Node, "is_head", property(wrong)), (Client, "add", _asks_any_head(Client.add))]


def _asks_any_head(add: Any) -> Any:
    def wrong(self: Client, shard: int, build: Any, pending: Any) -> Any:
        nodes = [asked.head for asked in self.asked]
        request = add(self, shard, build, pending)
        if self.worker % 2 and self.epoch:
            self.asked[shard].head = nodes[shard]
        return request

    return wrong


def entry_not_sent_again() -> Patches:
    """The head sends an entry that the next copy has not confirmed only once."""
    tick = Node.tick

    def wrong(self: Node, now_s: float) -> Outbox:
        self._retry_at_s = float("inf")
        return tick(self, now_s)

    return [(Node, "tick", wrong)]


def request_not_sent_again() -> Patches:
    """A request without an answer is sent only once."""

    def wrong(self: Requests, now_s: float) -> list[Request]:
        self._retry_at_s = float("inf")
        return []

    return [(Requests, "late", wrong)]


def entry_skipped() -> Patches:
    """A copy takes an entry although the one before it has not come."""
    replicate = Node._replicate

    def wrong(self: Node, now_s: float, source: int, message: Replicate) -> Outbox:
        if not self.blank and message.epoch == self.epoch and message.index > self.index + 1:
            self.index = self.shard.index = message.index - 1
        return replicate(self, now_s, source, message)

    return [(Node, "_replicate", wrong)]


def install_ignored_and_confirmed() -> Patches:
    """A blank copy says that it has the state, and throws it away."""

    def wrong(self: Node, now_s: float, source: int, message: Install) -> Outbox:
        if message.epoch == self.epoch and source == self._predecessor and self.blank:
            self.index = self.committed = self.shard.index = message.index
            self.blank = False
        return self._confirm()

    return [(Node, "_installed", wrong)]


def done_when_one_shard_has_answered() -> Patches:
    """A push counts as done when the first shard has acknowledged it."""
    learn = Client._learn

    def wrong(self: Client, reply: Pushed, pending: Any) -> None:
        learn(self, reply, pending)
        pending.waits_for.clear()

    return [(Client, "_learn", wrong)]


def head_not_followed() -> Patches:
    """A worker goes on asking the head that it knew first."""

    def wrong(self: Requests, head: int, now_s: float) -> list[Request]:
        return self.late(now_s)

    return [(Requests, "ask", wrong)]
