"""Hierarchy: within each host first, then between hosts, so that the network carries each host's sum once.

Source: the two-level scheme of X. Jia et al., "Highly scalable deep learning training system with
mixed-precision", 2018, and of Horovod's hierarchical all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polytempo.collectives.ring import ring, ring_price
from polytempo.collectives.tree import broadcast_from_root, expect_from_root, reduce_to_root, tree_price
from polytempo.core import Port, Price, Route, call_name


def hierarchical(between: Route = ring) -> Route:
    """The route that adds within hosts by a tree, between hosts' first ranks by `between`, and tells the rest.

        host 0: 0 ← 1 ← 2   \\                    / 0 → 1 → 2
                              between(0, 3, 6)
        host 1: 3 ← 4 ← 5   /                    \\ 3 → 4 → 5

    Hosts may hold different numbers of ranks. Cost: the tree's within a host, and between H hosts the
    cost of `between` with N = H: by ring 2(H-1)/H · K bytes through each host's link.
    """

    return Hierarchical(between)


@dataclass(frozen=True)
class Hierarchical:
    """See `hierarchical`."""

    between: Route

    @property
    def __name__(self) -> str:
        return call_name(hierarchical, vars(self))

    async def __call__(self, port: Port, buffer: Tensor) -> Tensor:
        """The sum of all ranks' buffers."""
        within = port.among([r for r in range(port.size) if port.hosts[r] == port.hosts[port.rank]])
        coming = await expect_from_root(within, buffer)
        buffer = await reduce_to_root(within, buffer)
        if within.rank == 0:
            leaders = port.among([port.hosts.index(host) for host in dict.fromkeys(port.hosts)])
            buffer = await self.between(leaders, buffer)
        return await broadcast_from_root(within, buffer, coming)


def hierarchical_price(
    num_hosts: int,
    ranks_per_host: int,
    num_bytes: float,
    within: tuple[float, float],
    between: tuple[float, float],
) -> Price:
    """The tree's price over `within` and the ring's over `between`, each a pair (latency_s, bytes_per_s)."""
    inside = tree_price(ranks_per_host, num_bytes, *within)
    outside = ring_price(num_hosts, num_bytes, *between)
    return Price(
        inside.steps + outside.steps, inside.busiest_bytes + outside.busiest_bytes, inside.seconds + outside.seconds
    )
