"""`Topology`: which nodes a run has, what each of them is, and on which host. Arithmetic on numbers, nothing else.

node   0 … W-1  workers │ W …  copies of shard 0, copies of shard 1, … │ the coordinator │ the evaluator, if processes
       └── all of a collective run └── what a parameter server has beside them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

RoleName = Literal["worker", "copy", "coordinator", "evaluator"]
Chain = tuple[int, ...]
"""The nodes of the copies of one shard."""


@dataclass(frozen=True)
class Topology:
    """The nodes by number. Make it by `collective` or `served`."""

    workers: tuple[int, ...]
    chains: tuple[Chain, ...] = ()
    spares: tuple[Chain, ...] = ()
    """The chains of shards that come later."""
    coordinator: int = -1
    """-1: a collective run has none."""
    hosts: tuple[int, ...] = ()
    """Each node's host by number; nodes beyond are on host 0."""
    axes: dict[str, int] = field(default_factory=dict)
    """The mesh of the workers: each axis with its size, the last one varies first. Empty: one axis, `data`."""

    def __post_init__(self) -> None:
        """Refuse a mesh that does not have the workers' number."""
        if self.axes and prod(self.axes.values()) != len(self.workers):
            shown = " x ".join(f"{name}={size}" for name, size in self.axes.items())
            raise ValueError(
                f"a mesh of {shown} has {prod(self.axes.values())} places, and there are {len(self.workers)} workers; "
                "give sizes whose product is the number of workers"
            )

    @classmethod
    def collective(cls, workers: int, hosts: Sequence[int] = (), axes: Mapping[str, int] | None = None) -> Topology:
        """`workers` ranks that meet each other, and nothing else."""
        return cls(tuple(range(workers)), hosts=tuple(hosts), axes=dict(axes or {}))

    @classmethod
    def served(cls, workers: int, shards: int, replicas: int, added: int = 0) -> Topology:
        """`workers`, the copies of so many `shards`, the coordinator. `added` shards come later."""
        copies = 1 + replicas
        chains = tuple(
            tuple(range(workers + shard * copies, workers + (shard + 1) * copies)) for shard in range(shards + added)
        )
        return cls(tuple(range(workers)), chains[:shards], chains[shards:], workers + (shards + added) * copies)

    @property
    def is_served(self) -> bool:
        """Whether there is a parameter server."""
        return self.coordinator >= 0

    @property
    def evaluator(self) -> int:
        """The node of the process that scores; there is none in the virtual world, and without a test set."""
        return self.coordinator + 1

    @property
    def num_servers(self) -> int:
        """Copies of shards, and the coordinator."""
        return self.coordinator + 1 - len(self.workers) if self.is_served else 0

    @property
    def num_nodes(self) -> int:
        """Without an evaluator, and without nodes that take another one's place."""
        return self.coordinator + 1 if self.is_served else len(self.workers)

    def role_of(self, node: int) -> RoleName:
        """What a node is; one beyond the evaluator is a copy that takes a lost one's place."""
        if node in self.workers:
            return "worker"
        if not self.is_served:
            raise ValueError(f"there is no node {node}; there are {len(self.workers)} workers, numbered from 0")
        if node == self.coordinator:
            return "coordinator"
        return "evaluator" if node == self.evaluator else "copy"

    def shard_of(self, node: int) -> int | None:
        """The shard of which a node is a copy from the beginning; None for others."""
        return next((shard for shard, chain in enumerate((*self.chains, *self.spares)) if node in chain), None)

    def host_of(self, node: int) -> int:
        """The host of a node."""
        return self.hosts[node] if 0 <= node < len(self.hosts) else 0

    def coordinates(self, worker: int) -> dict[str, int]:
        """Where a worker is in the mesh: on the axes (data=2, stage=3), worker 4 is at data 1, stage 1."""
        position, axes = self.workers.index(worker), self.axes or {"data": len(self.workers)}
        found = dict.fromkeys(axes, 0)
        for name in reversed(axes):
            position, found[name] = divmod(position, axes[name])
        return found

    def along(self, axis: str, worker: int) -> tuple[int, ...]:
        """The workers that differ from `worker` on `axis` alone, and `worker` itself, in order."""
        mine = self.coordinates(worker)
        if axis not in mine:
            raise ValueError(f"the mesh has no axis {axis!r}; its axes are {', '.join(mine)}")
        return tuple(w for w in self.workers if {**self.coordinates(w), axis: 0} == {**mine, axis: 0})

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """What `to_json` wrote."""
        plain: dict[str, Any] = json.loads(text)
        chains = {name: tuple(tuple(chain) for chain in plain[name]) for name in ("chains", "spares")}
        flat = {name: tuple(plain[name]) for name in ("workers", "hosts")}
        return cls(**{**plain, **chains, **flat})
