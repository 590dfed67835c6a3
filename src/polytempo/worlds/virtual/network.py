"""The virtual world's network: a queue at each end of every link, nothing in between.

sender's end   ├── busy: bytes / bandwidth ──┤
               ╰─ latency ─╮
receiver's end             ├── busy ──┤            later, if another message is still coming in
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polytempo.cluster import Cluster, Link

End = int
"""A rank's number for its end of its host's memory; behind all of these, a host's end of the network."""


class Contended(Exception):
    """Messages that were taken to be alone in the network are not."""


class Passage(msgspec.Struct, frozen=True):
    """A message on its way."""

    left_s: float
    """The time when its last byte has left the sender's end."""
    reaches_s: float
    """The time when its first byte is at the receiver's end."""
    busy_s: float
    """Seconds that it keeps an end busy."""
    into: End
    against_s: float = 0.0
    """Seconds that it keeps the other direction of its ends busy."""


class Network:
    """The times that the ends of links are free from. The ways out and in are separate, but for `Link.duplex`."""

    def __init__(self, cluster: Cluster, hosts: Sequence[int]) -> None:
        self.cluster, self.hosts = cluster, hosts
        self._host_ends = [len(hosts) + host for host in hosts]
        """The end of each rank's host."""
        self._out_s = [0.0] * (max(self._host_ends, default=0) + 1)
        self._in_s = list(self._out_s)
        self._reserved_s = self._taken_s = 0.0
        self._on_their_way = 0

    def idle(self, now_s: float) -> bool:
        """True if no message is on its way, and no end is taken."""
        return not self._on_their_way and self._taken_s <= now_s

    def reserve(self, until_s: float) -> None:
        """Reserve the ends for messages that are not sent one by one; a message before `until_s` raises `Contended`."""
        self._reserved_s = until_s

    def check(self, now_s: float) -> None:
        """Raise `Contended` where ends are reserved."""
        if now_s < self._reserved_s:
            raise Contended(f"a message at {now_s} s meets a whole sum's, which ends at {self._reserved_s} s")

    def send(self, sender: int, receiver: int, num_bytes: int, now_s: float) -> Passage:
        """Take the sender's end for a message, after messages that stand there already."""
        if now_s < self._reserved_s:
            self.check(now_s)
        link, out, into = self._link(sender, receiver)
        busy_s = num_bytes / link.bytes_per_s
        begin_s = max(now_s, self._out_s[out])
        self._out_s[out] = begin_s + busy_s
        self._on_their_way += 1
        against_s = busy_s * (1 / link.duplex - 1)
        if against_s:
            self._in_s[out] = max(self._in_s[out], begin_s) + against_s
            self._taken_s = max(self._taken_s, self._in_s[out])
        return Passage(begin_s + busy_s, begin_s + link.latency_s, busy_s, into, against_s)

    def receive(self, passage: Passage, now_s: float) -> float:
        """Take the receiver's end for a message with its first byte there; returns when its last byte is."""
        end_s = max(now_s, self._in_s[passage.into]) + passage.busy_s
        self._in_s[passage.into] = end_s
        self._on_their_way -= 1
        self._taken_s = max(self._taken_s, end_s)
        if passage.against_s:
            self._out_s[passage.into] = max(self._out_s[passage.into], end_s - passage.busy_s) + passage.against_s
            self._taken_s = max(self._taken_s, self._out_s[passage.into])
        return end_s

    def meet(self, members: Sequence[int], waiting_s: float, busy_s: float, now_s: float) -> float:
        """Take all members' ends, both ways, for `busy_s`; returns when a collective of them ends.

        `busy_s` is the part of its time that its bytes take, `waiting_s` the latencies. Collectives that are
        under way together share the bandwidth, so they follow each other there, and hide only latency.
        """
        self.check(now_s)
        within = len({self.hosts[member] for member in members}) == 1
        ends: set[End] = {member if within else self._host_ends[member] for member in members}
        begin_s = max([now_s, *(max(self._out_s[end], self._in_s[end]) for end in ends)])
        for end in ends:
            self._out_s[end] = self._in_s[end] = begin_s + busy_s
        self._taken_s = max(self._taken_s, begin_s + busy_s)
        return begin_s + waiting_s + busy_s

    def _link(self, sender: int, receiver: int) -> tuple[Link, End, End]:
        if self.hosts[sender] == self.hosts[receiver]:
            return self.cluster.memory, sender, receiver
        return self.cluster.network, self._host_ends[sender], self._host_ends[receiver]
