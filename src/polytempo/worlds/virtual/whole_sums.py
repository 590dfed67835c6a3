"""Sums by routes of this library in one go, where nothing else uses the network from their begin to their end.

    ring, 3 ranks    round 0    0 ▶ 1 ▶ 2 ▶ 0     one vector operation for a round instead of a message for a rank
                     round 1    0 ▶ 1 ▶ 2 ▶ 0
                     …

Each message begins, arrives and waits at the ends of links as it would if it were sent, so times are the same to the
bit. Ranks that come early are held until the last one is there: none of them could be done before that. Where something
else needs the network meanwhile, or the order of messages at an end is not clear, `Contended` ends the run, and a world
that sends all messages has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.cluster import Cluster, Link
from polytempo.collectives import halving_doubling, ring, star
from polytempo.collectives.halving import halving_doubling_rounds
from polytempo.collectives.invariant import Invariant, invariant_rounds
from polytempo.collectives.ring import IntArray, Round, ring_rounds
from polytempo.core.op import WholeSum
from polytempo.worlds.trace import Event, Trace
from polytempo.worlds.virtual.clockwork import Asymmetric, Clockwork, Flight
from polytempo.worlds.virtual.network import Contended, Network

FloatArray = NDArray[np.float64]


class Played:
    """The result of a sum by a route: each rank's end, sent bytes, and numbers of messages."""

    def __init__(self, begin_s: FloatArray) -> None:
        num_ranks = len(begin_s)
        self.end_s = begin_s
        self.sent_bytes = np.zeros(num_ranks, np.int64)
        self.sent = np.zeros(num_ranks, np.int64)
        self.received = np.zeros(num_ranks, np.int64)


def played(op: WholeSum, hosts: Sequence[int], cluster: Cluster, begin_s: FloatArray) -> Played | None:
    """The sum of ranks on these `hosts`, from each rank's `begin_s`; None where only messages tell."""
    num_ranks, numel, itemsize = len(hosts), op.buffer.numel(), op.buffer.element_size()
    if op.route is star:
        return _star(hosts, cluster, numel * itemsize, begin_s)
    rounds: Callable[[int, int], Iterator[Round]]
    if op.route is ring:
        rounds = ring_rounds
    elif op.route is halving_doubling and not num_ranks & (num_ranks - 1):
        rounds = halving_doubling_rounds
    elif isinstance(op.route, Invariant):
        rounds = invariant_rounds
    else:
        return None
    if len(set(hosts)) == num_ranks:
        return _one_a_host(rounds(num_ranks, numel), itemsize, cluster.network, begin_s)
    return _several_a_host(rounds(num_ranks, numel), itemsize, np.asarray(hosts), cluster, begin_s)


def _one_a_host(rounds: Iterator[Round], itemsize: int, link: Link, begin_s: FloatArray) -> Played | None:
    """Each rank has its link's ends for itself: arrays by the rank that receives."""
    found = Played(begin_s)
    in_s, reached_s = np.zeros(len(begin_s)), np.full(len(begin_s), -np.inf)
    to, num_rounds, sent = None, 0, np.zeros(len(begin_s), np.int64)
    for each in rounds:
        if each.to is not to:
            to, arrived = each.to, _arrival(each.to)
        busy_s = each.numel * itemsize / link.bytes_per_s
        reaches_s = arrived(found.end_s + link.latency_s)
        if (reaches_s <= reached_s).any():
            return None  # a message of an earlier round comes later
        in_s, reached_s = np.maximum(reaches_s, in_s) + arrived(busy_s), reaches_s
        found.end_s = np.maximum(found.end_s + busy_s, in_s)
        sent += each.numel
        num_rounds += 1
    found.sent_bytes = sent * itemsize
    found.sent += num_rounds
    found.received = found.sent
    return found


def _arrival(to: IntArray) -> Callable[[FloatArray], FloatArray]:
    """Map the senders' values to their receivers, where rank r sends to `to[r]`."""
    by = int(to[0])
    if by and (to[:-by] == np.arange(by, len(to))).all() and (to[-by:] == np.arange(by)).all():
        return lambda sent: np.concatenate((sent[-by:], sent[:-by]))  # a rotation, without an index
    source = np.argsort(to)
    return lambda sent: sent[source]


def _several_a_host(
    rounds: Iterator[Round], itemsize: int, hosts: NDArray[np.int64], cluster: Cluster, begin_s: FloatArray
) -> Played | None:
    """Ranks share the ends of hosts' links: arrays by end, first hosts' ends, then ranks' ends of memory."""
    num_ranks, first = len(hosts), int(hosts.max()) + 1
    ranks, found = np.arange(num_ranks), Played(begin_s)
    out_s, in_s = (np.zeros(first + num_ranks) for _ in range(2))
    begun_s, reached_s = (np.full(first + num_ranks, -np.inf) for _ in range(2))
    network, memory = cluster.network, cluster.memory
    for to, numel in rounds:
        within = hosts == hosts[to]
        out, into = np.where(within, first + ranks, hosts), np.where(within, first + to, hosts[to])
        if len(np.unique(out)) < num_ranks or len(np.unique(into)) < num_ranks:
            return None
        sent_bytes = numel * itemsize
        busy_s = sent_bytes / np.where(within, memory.bytes_per_s, network.bytes_per_s)
        leaves_s = np.maximum(found.end_s, out_s[out])
        reaches_s = leaves_s + np.where(within, memory.latency_s, network.latency_s)
        if (found.end_s <= begun_s[out]).any() or (reaches_s <= reached_s[into]).any():
            return None  # at an end that ranks share, a message of an earlier round comes later
        left_s, there_s = leaves_s + busy_s, np.maximum(reaches_s, in_s[into]) + busy_s
        out_s[out], in_s[into], begun_s[out], reached_s[into] = left_s, there_s, found.end_s, reaches_s
        arrived_s = np.empty(num_ranks)
        arrived_s[to] = there_s
        found.end_s = np.maximum(left_s, arrived_s)
        found.sent_bytes += sent_bytes
        found.sent += 1
    found.received = found.sent
    return found


def _star(hosts: Sequence[int], cluster: Cluster, num_bytes: int, begin_s: FloatArray) -> Played | None:
    num_hosts, num_ranks = len(set(hosts)), len(hosts)
    if num_hosts not in (1, num_ranks):
        return None
    link, found = cluster.memory if num_hosts == 1 else cluster.network, Played(begin_s.copy())
    busy_s = num_bytes / link.bytes_per_s
    there_s = 0.0
    for reaches_s in np.sort(begin_s[1:] + link.latency_s).tolist():
        there_s = max(reaches_s, there_s) + busy_s
    left_s = max(there_s, float(begin_s[0]))
    for rank, begun_s in enumerate(begin_s[1:].tolist(), start=1):
        reaches_s, left_s = left_s + link.latency_s, left_s + busy_s
        found.end_s[rank] = max(begun_s + busy_s, reaches_s + busy_s)
    found.end_s[0] = left_s
    found.sent[:], found.sent_bytes[:] = 1, num_bytes
    found.sent[0], found.sent_bytes[0] = num_ranks - 1, (num_ranks - 1) * num_bytes
    found.received = found.sent
    return found


class WholeSums:
    """Answers the ranks' `WholeSum`s. `acting`: as in `VirtualWorld`."""

    def __init__(self, world: Clockwork, network: Network, trace: Trace, acting: Sequence[int] | None) -> None:
        self._world, self._network, self._trace, self._acting = world, network, trace, acting
        self._op: WholeSum | None = None
        """The sum that some members have asked for."""
        self._asking: dict[int, Flight] = {}

    def join(self, flight: Flight, op: WholeSum) -> None:
        """Let one member ask. It hears False now if messages are on their way, a link's directions share it, or
        messages take the receivers' processors."""
        world = self._world
        if self._op is None:
            self._network.check(world.now_s)
            cluster = self._network.cluster
            duplex = min(cluster.network.duplex, cluster.memory.duplex)
            if duplex < 1 or cluster.handles_messages or not self._network.idle(world.now_s):
                return world.at(world.now_s, lambda: world.land(flight, False, None))
            self._op = op
            self._network.reserve(np.inf)
        elif _facts(self._op) != _facts(op):
            raise Contended(f"{op} meets {self._op}")
        self._asking[flight.rank] = flight
        if len(self._asking) == len(op.members if self._acting is None else self._acting):
            self._pass(op)

    def _pass(self, op: WholeSum) -> None:
        flights, self._asking, self._op = self._asking, {}, None
        network = self._network
        if self._acting is not None and len(op.members) < len(network.hosts):
            raise Asymmetric(f"{op} of {len(network.hosts)}")
        if self._acting is not None and op.buffer.numel() % len(op.members):
            raise Asymmetric(f"{op} with parts that are not equal")
        hosts = [network.hosts[member] for member in op.members]
        now_s = self._world.now_s
        begin_s = np.array([flights[rank].started_s if rank in flights else now_s for rank in op.members])
        found = played(op, hosts, network.cluster, begin_s)
        if found is None:
            raise Contended(f"the order of messages of {op} is not clear")
        last_s = float(found.end_s.max())
        if self._acting is not None and float(found.end_s.min()) < last_s:
            raise Asymmetric(f"{op}, which does not end for all ranks at one time")
        network.reserve(last_s)
        for position, rank in enumerate(op.members):
            if rank in flights:
                self._land(flights[rank], found, position)

    def _land(self, flight: Flight, found: Played, position: int) -> None:
        end_s, sent, received = float(found.end_s[position]), int(found.sent[position]), int(found.received[position])
        sent_bytes = int(found.sent_bytes[position])

        def end() -> None:
            event = Event(flight.rank, flight.step, "send", sent_bytes, flight.started_s, end_s)
            self._trace.add_messages(event, sent, received)
            self._world.land(flight, True, None)

        self._world.at(end_s, end)


def _facts(op: WholeSum) -> tuple[Any, ...]:
    return op.members, op.channel, op.route, op.buffer.shape, op.buffer.dtype
