"""Ranks of one host map each other's memory: they exchange addresses through a store."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from polytempo.native.arena import ArenaAddress, Window, window


class Store(Protocol):
    """A store of messages between ranks that do not share memory yet, like torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Store a message."""

    def get(self, key: str, /) -> bytes:
        """Wait for a message, at most as long as the store does."""


class Unreachable(RuntimeError):
    """Some ranks cannot map each other's memory. Every member of the group raises this, with the reason."""


class Member(NamedTuple):
    """A rank's arena and its blocks in it, as the others need them."""

    address: ArenaAddress
    host: str
    staging: int
    rings: int
    control: int

    def as_json(self) -> str:
        """The message with these values."""
        return json.dumps([list(self.address), *self[1:]])

    @classmethod
    def from_json(cls, text: bytes) -> Member:
        """The values in a message; raises Unreachable where it is a rank's report of its absence."""
        message = json.loads(text)
        if isinstance(message, dict):
            raise Unreachable(str(message["reason"]))
        address, host, staging, rings, control = message
        return cls(ArenaAddress(*map(int, address)), str(host), int(staging), int(rings), int(control))


def host_identity() -> str:
    """Processes with equal identities can map each other's memory: one running kernel, one tree of processes."""
    parts = [os.environ.get("POLYTEMPO_HOST", "")]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text(encoding="ascii").strip())
        except OSError:
            parts.append("?")
    return "/".join(parts)


def report_absence(store: Store, rank: int, reason: str) -> Unreachable:
    """Store why this rank does not come, so that the others do not wait for it. Returns the error to raise."""
    store.set(f"member/{rank}", json.dumps({"reason": reason}))
    return Unreachable(reason)


def exchange_members(store: Store, rank: int, size: int, mine: Member) -> list[Member]:
    """All members, in the order of ranks. Raises Unreachable on every rank where one of them reports its absence."""
    store.set(f"member/{rank}", mine.as_json())
    return [mine if r == rank else Member.from_json(store.get(f"member/{r}")) for r in range(size)]


def map_arenas(store: Store, rank: int, members: Sequence[Member]) -> list[Window | None]:
    """Windows onto all arenas but our own. All ranks learn whether all could map all."""
    windows: list[Window | None] = []
    reason = ""
    try:
        hosts = {member.host for member in members}
        if len(hosts) > 1:
            raise OSError(0, "they are on different hosts or in different containers")
        windows = [None if r == rank else window(member.address) for r, member in enumerate(members)]
    except OSError as error:
        reason = f"rank {rank}: {error.strerror}"
    store.set(f"mapped/{rank}", reason or "yes")
    answers = [store.get(f"mapped/{r}").decode() for r in range(len(members))]
    refused = [answer for answer in answers if answer != "yes"]
    if refused:
        raise Unreachable(f"these ranks cannot share memory: {'; '.join(sorted(set(refused)))}")
    return windows
