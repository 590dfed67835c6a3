"""`Cluster`: the machines of a virtual world. Hosts, links, speeds, stragglers."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytempo.cluster.faults import Fault
from polytempo.cluster.stragglers import Stragglers, constant


@dataclass(frozen=True)
class Link:
    """One end of a full-duplex connection: α seconds until the first byte arrives, then B bytes a second."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Raise ValueError for a negative latency or no bandwidth."""
        if self.latency_s < 0 or not self.bytes_per_s > 0:
            raise ValueError(f"a link needs latency_s >= 0 and bytes_per_s > 0, got {self}")


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal shape, joined by a network that never blocks inside; contention is at each host's end.

    Messages between hosts share their hosts' `network` link (one queue out, one queue in); messages
    within a host use the `memory` link of the two ranks. A computation of `f` flops takes
    `f / flops_per_s` seconds times the stragglers' factor.
    """

    network: Link
    memory: Link = Link(latency_s=1e-6, bytes_per_s=10e9)
    workers_per_host: int = 1
    servers: int = 0
    """How many of the last ranks are no workers: each has a host of its own, after the workers' hosts."""
    flops_per_s: float = 10e9
    stragglers: Stragglers = field(default_factory=constant)
    faults: tuple[Fault, ...] = ()
    detection_s: float = 1e-3
    """Seconds from a rank's death until its peers' operations fail."""
    name: str = "cluster"

    def __post_init__(self) -> None:
        """Raise ValueError for a cluster without workers or speed."""
        if self.workers_per_host < 1 or not self.flops_per_s > 0:
            raise ValueError(
                f"a cluster needs workers_per_host >= 1 and flops_per_s > 0, got {self.workers_per_host} "
                f"and {self.flops_per_s}"
            )

    def hosts(self, num_ranks: int) -> tuple[int, ...]:
        """The host of each rank: filled one after the other, and then one for each server."""
        workers = tuple(rank // self.workers_per_host for rank in range(num_ranks - self.servers))
        first = max(workers, default=-1) + 1
        return workers + tuple(range(first, first + self.servers))

    def slowest_link(self, hosts: tuple[int, ...]) -> Link:
        """The link that bounds a collective among ranks on these hosts."""
        return self.memory if len(set(hosts)) <= 1 else self.network
