"""`Topology`: the nodes of a run, their roles and their hosts. Arithmetic on numbers, nothing else.

node   0 … W-1  workers │ W …  copies of shard 0, copies of shard 1, … │ the coordinator │ the evaluator, if processes
    └── all of a collective run └── further nodes with a parameter server

With K stages and a parameter server node k·D + d is stage k of replica d, of D = W / K replicas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from polytempo.core import Mesh

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
    mesh: Mesh | None = None
    """The workers' places on named axes; None: all on one."""
    stages: int = 1
    """Workers that hold one model together, where there is a parameter server."""

    def __post_init__(self) -> None:
        """Refuse a mesh that does not have the workers' number."""
        if self.mesh is not None and self.mesh.size != len(self.workers):
            raise ValueError(
                f"{self.mesh} has {self.mesh.size} places, and there are {len(self.workers)} workers; give lengths "
                "with that product"
            )

    @classmethod
    def collective(cls, workers: int, hosts: Sequence[int] = (), mesh: Mesh | None = None) -> Topology:
        """`workers` ranks that meet each other, and nothing else."""
        return cls(tuple(range(workers)), hosts=tuple(hosts), mesh=mesh)

    @classmethod
    def served(
        cls,
        workers: int,
        shards: int,
        replicas: int,
        added: int = 0,
        hosts: Sequence[int] = (),
        stages: int = 1,
    ) -> Topology:
        """`workers`, the copies of so many `shards`, the coordinator. `added` shards come later.

        `stages` of them hold one model together; each stage has as many of the `shards`, in the stages' order.
        """
        copies = 1 + replicas
        chains = tuple(
            tuple(range(workers + shard * copies, workers + (shard + 1) * copies)) for shard in range(shards + added)
        )
        coordinator = workers + (shards + added) * copies
        return cls(tuple(range(workers)), chains[:shards], chains[shards:], coordinator, tuple(hosts), stages=stages)

    @property
    def is_served(self) -> bool:
        """True if there is a parameter server."""
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
        """Number of nodes, without an evaluator and replacements."""
        return self.coordinator + 1 if self.is_served else len(self.workers)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The workers that ask for work: the workers of the first stage, each for its replica."""
        return self.workers[: len(self.workers) // self.stages]

    def stage_of(self, worker: int) -> int:
        """The stage of the model that a worker has."""
        return worker // len(self.firsts)

    def replica_of(self, worker: int) -> tuple[int, ...]:
        """The workers of all stages of the replica that a worker is part of, in the order of stages."""
        return self.workers[worker % len(self.firsts) :: len(self.firsts)]

    def beside(self, worker: int) -> tuple[int, ...]:
        """The workers that have the same stage of all replicas, this one among them."""
        first = self.stage_of(worker) * len(self.firsts)
        return self.workers[first : first + len(self.firsts)]

    def role_of(self, node: int) -> RoleName:
        """A node's role; a node beyond the evaluator is a copy that takes a lost one's place."""
        if node in self.workers:
            return "worker"
        if not self.is_served:
            raise ValueError(f"there is no node {node}; there are {len(self.workers)} workers, numbered from 0")
        if node == self.coordinator:
            return "coordinator"
        return "evaluator" if node == self.evaluator else "copy"

    def shard_of(self, node: int) -> int | None:
        """The shard that a node copies from the beginning; None for others."""
        return next((shard for shard, chain in enumerate((*self.chains, *self.spares)) if node in chain), None)

    def host_of(self, node: int) -> int:
        """The host of a node."""
        return self.hosts[node] if 0 <= node < len(self.hosts) else 0

    def to_json(self) -> str:
        """The topology as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The topology that `to_json` wrote."""
        plain: dict[str, Any] = json.loads(text)
        chains = {name: tuple(tuple(chain) for chain in plain[name]) for name in ("chains", "spares")}
        flat = {name: tuple(plain[name]) for name in ("workers", "hosts")}
        axes = plain["mesh"]
        mesh = None if axes is None else Mesh(tuple((axis, length) for axis, length in axes["axes"]))
        return cls(**{**plain, **chains, **flat, "mesh": mesh})


def num_added(shards: int, wanted: Mapping[int, int]) -> int:
    """Number of shards that join during a run that begins with `shards`."""
    counts = [shards, *(number for _, number in sorted(wanted.items()))]
    return sum(max(0, after - before) for before, after in pairwise(counts))
