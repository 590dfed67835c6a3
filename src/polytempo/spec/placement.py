"""Hosts of a run's nodes. Arithmetic on numbers, nothing else."""

from __future__ import annotations

from dataclasses import replace

from polytempo.spec.topology import Topology


def on_hosts(topology: Topology, num_hosts: int) -> Topology:
    """The topology with its nodes on so many hosts, as `placed` says; on one host it stays as it is."""
    return topology if num_hosts <= 1 else replace(topology, hosts=placed(topology, num_hosts))


def placed(topology: Topology, num_hosts: int) -> tuple[int, ...]:
    """Each node's host, for `topology.hosts`.

    Workers stand in blocks of W / H, so that neighbours in rank order share a host where that is possible. The copies
    of one shard are on different hosts, as far as there are so many, and primaries are spread; the coordinator is the
    launcher's, which is on none of these hosts, and the evaluator has the last host.

        8 workers, 2 shards of 2 copies, 4 hosts:    0 0 1 1 2 2 3 3 │ 0 1 │ 1 2 │ -1 │ 3
    """
    num_workers = len(topology.workers)
    hosts = [worker * num_hosts // num_workers for worker in range(num_workers)]
    if not topology.is_served:
        return tuple(hosts)
    for shard, chain in enumerate((*topology.chains, *topology.spares)):
        hosts += [(shard + copy) % num_hosts for copy in range(len(chain))]
    return (*hosts, -1, num_hosts - 1)
