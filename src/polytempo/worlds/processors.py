"""The processors of a virtual world: what each rank computes, one thing after the other, and for how long."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from polytempo.cluster import Cluster
from polytempo.core.op import Alone, Compute
from polytempo.worlds.clockwork import Clockwork
from polytempo.worlds.operations import Flight
from polytempo.worlds.pace import Pace


class Processors:
    """Computations run when they are asked for, and end `Cluster.computing_s` times the straggler's factor later."""

    def __init__(self, world: Clockwork, cluster: Cluster, hosts: Sequence[int], seed: int) -> None:
        self._world, self._cluster, self._hosts = world, cluster, hosts
        self._first_server = len(hosts) - cluster.servers
        self._pace = Pace(cluster.stragglers, hosts, seed)
        self._free_s = [0.0] * len(hosts)
        self._alone: dict[int, deque[tuple[Flight, Alone[Any]]]] = defaultdict(deque)
        """Those that want to be alone on a host, in the order in which they asked; the first one is."""

    def begin_step(self, rank: int, step: int) -> None:
        """Rank `rank` marks `step`: its factor is drawn anew."""
        self._pace.begin(rank, step, self._world.now_s)

    def begin_step_alike(self, step: int) -> bool:
        """All ranks mark `step`. Whether they are equally fast in it."""
        return self._pace.begin_all(step, self._world.now_s)

    def compute(self, flight: Flight, op: Compute[Any]) -> None:
        """Compute after what the rank computes already."""
        world, rank = self._world, flight.rank
        flight.started_s = max(world.now_s, self._free_s[rank])
        full_speed_s = self._cluster.computing_s(op.flops, op.uses, server=rank >= self._first_server)
        self._free_s[rank] = flight.started_s + full_speed_s * self._pace.factor(rank, flight.started_s)
        value, error = None, None
        try:
            value = op.work()
        except Exception as raised:
            error = raised
        world.at(self._free_s[rank], lambda: world.end(flight, op.name, 0, value, error=error))

    def compute_alone(self, flight: Flight, op: Alone[Any]) -> None:
        """Compute when no other rank of the host is in one of these."""
        queue = self._alone[self._hosts[flight.rank]]
        queue.append((flight, op))
        if len(queue) == 1:
            self._let_in(queue)

    def _let_in(self, queue: deque[tuple[Flight, Alone[Any]]]) -> None:
        """Let the first that still waits compute alone, and the next one when that is over."""
        while queue and (queue[0][0].done or queue[0][0].rank in self._world.lost):
            queue.popleft()
        if queue:
            self.compute(*queue[0])

            def leave() -> None:
                queue.popleft()
                self._let_in(queue)

            self._world.at(self._free_s[queue[0][0].rank], leave)
