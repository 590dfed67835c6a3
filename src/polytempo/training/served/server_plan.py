"""`ServerPlan`: the nodes of a run with a parameter server, the contents of its shards, its waiting times and limits.

RunSpec   ──▶ ServedProgram ┐
                            ├─▶ ServerPlan ──▶ clients, copies of shards, batch scheduler, coordinator
own loop  ──▶ LoopFacts ────┘                  on processes, under the virtual clock, in a replay
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from polytempo.core.rule import Service
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator, Listeners, Nodes
from polytempo.server.coordinator.resharding import Reshaper
from polytempo.server.layout import (
    Empty,
    Parameter,
    Spans,
    StageSpans,
    part,
    plain_empty,
    shard_map,
    stage_spans,
    without_values,
)
from polytempo.server.message import Entry
from polytempo.server.pieces import without_tables
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.score_snapshots import MOST as SNAPSHOTS
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client, VectorFormat
from polytempo.server.worker.host.lent_gradients import LentGradients
from polytempo.spec.topology import Topology

_MOST_HELD = 1024
"""A worker asks for one ticket at a time, so it holds as many as its strategy pushes together, and one or two more."""
_SPARE_BUFFERS = 12
"""So many vectors as large as the parameters fit into an arena, beside one for each worker."""
_BUFFERS_OF_A_REGION = 4
"""A region has weights and momentum, and both once more while a state is loaded."""
_SPARE_BYTES = 64 << 20
_SLOWLY_BYTES_PER_S = 100e6
"""A copy is not thought dead for touching its parameters at this rate."""


class PlannedStage(NamedTuple):
    """A stage of a model that is cut, as its shards know it."""

    parameters: tuple[str, ...]
    """The names of its trained parameters, in the order of a push."""
    running: int
    """Numbers in the running statistics of its norms."""


@dataclass(frozen=True, eq=False)
class ServerPlan:
    """The parameter server of a run, and how its workers meet it. The same in every process of the run."""

    service: Service
    """The service with the shards' optimizer, and the number of all shards."""
    topology: Topology
    parameters: tuple[Parameter, ...]
    weights: Tensor
    """The parameters' values one after the other, shape (numel,)."""
    running: Tensor | None
    """The running statistics of norms, float64; None where the model has none. Of stages: one after the other."""
    timing: Timing
    stages: tuple[PlannedStage, ...] = ()
    """Stages of a cut model; (): every worker has all of it."""
    passed_bytes: int = 0
    """The largest tensor that passes from stage to stage."""
    spare_lives: int = 0
    incarnation: int = 1
    """The first life of every worker: above all that a resumed run has known."""

    # ------------------------------------------------------------------ limits

    @property
    def most_lives(self) -> int:
        """Processes of the run in all, replacements included."""
        return self.topology.num_nodes + self.spare_lives + 1

    @property
    def hosts(self) -> list[int]:
        """The host of each node, later ones included."""
        return [self.topology.host_of(node) for node in range(self.most_lives)]

    @property
    def mail_bytes(self) -> int:
        """The largest tensors that any message carries, in all."""
        return max(self.passed_bytes, (2 * len(self.topology.workers) + 8) * self.weights.nbytes)

    @property
    def arena_bytes(self) -> int:
        """The address space that one process needs for tensors that others read in place."""
        dense_bytes = sum(each.numel for each in without_tables(self.parameters)) * self.weights.itemsize
        workers, size = len(self.topology.workers), self.service.rule.region_size
        of_regions = _BUFFERS_OF_A_REGION * -(-workers // size) if size else 0
        return (workers + _SPARE_BUFFERS + SNAPSHOTS + of_regions) * dense_bytes + _SPARE_BYTES

    # ------------------------------------------------------------------ the shards' contents

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """The ranges of the vector of all parameters that each shard holds."""
        if not self.stages:
            return shard_map(self.parameters, self.service.shards)
        return tuple(shard.whole for stage in self._stage_shards for shard in stage)

    def pushed_by(self, worker: int) -> tuple[tuple[Parameter, ...], tuple[Spans, ...]]:
        """The parameters that a worker pushes, and each shard's ranges of their vector."""
        if not self.stages:
            return self.parameters, self.spans
        stage = self.topology.stage_of(worker)
        found = [(number, shard) for number, shards in enumerate(self._stage_shards) for shard in shards]
        return self._own[stage], tuple(shard.own if number == stage else () for number, shard in found)

    def running_at(self, shard: int) -> Tensor | None:
        """The running statistics that a shard begins with: with stages, its own stage's."""
        if not self.stages or self.running is None:
            return self.running
        found = self.running.split([each.running for each in self.stages])[shard // self._shards_of_each]
        return found if len(found) else None

    def first_worker(self, shard: int) -> int:
        """The node of the first worker that a shard serves; the others follow it."""
        if not self.stages:  # every shard serves all, later ones too
            return 0
        return shard // self._shards_of_each * len(self.topology.firsts)

    @property
    def _shards_of_each(self) -> int:
        return self.service.shards // len(self.stages)

    @cached_property
    def _own(self) -> tuple[tuple[Parameter, ...], ...]:
        known = {parameter.name: parameter for parameter in self.parameters}
        return tuple(tuple(known[name] for name in stage.parameters) for stage in self.stages)

    @cached_property
    def _stage_shards(self) -> tuple[tuple[StageSpans, ...], ...]:
        return tuple(stage_spans(self.parameters, own, self._shards_of_each) for own in self._own)

    # ------------------------------------------------------------------ machines

    def client(
        self,
        worker: int,
        incarnation: int,
        chains: Sequence[Sequence[int]] | None = None,
        memory: LentGradients | None = None,
        peers: Sequence[int] = (),
    ) -> Client:
        """The side of the server of the process on node `worker`.

        The stages of a replica all have the first one's number, and each asks its own shards. `chains`: where the
        shards' copies are by now, if not where they began.

        `peers`: see `peers_of`; a replay leaves them out, for its records say which gradients were summed.
        """
        parameters, spans = self.pushed_by(worker)
        if memory is None and self.weights.is_meta:
            memory = LentGradients(without_values, lambda tensor: True)
        return Client(
            self.topology.replica_of(worker)[0],
            incarnation,
            spans,
            self.topology.chains if chains is None else chains[: len(self.spans)],  # the first view tells of newer ones
            self.topology.coordinator,
            self.timing,
            VectorFormat(self.weights.dtype, parameters, self.service.codec, self.service.pull_codec),
            memory=memory,
            peers=peers,
        )

    def peers_of(self, worker: int) -> Sequence[int]:
        """The workers of its host, where these sum their gradients before they push; () elsewhere."""
        if not self.service.hierarchical:
            return ()
        host_of = self.topology.host_of
        return [other for other in self.topology.workers if host_of(other) == host_of(worker)]

    def shard(
        self, number: int, spans: Sequence[Spans] | None = None, empty: Empty | None = None, native: bool | None = None
    ) -> Shard:
        """Shard `number` as the run begins. `spans`: each shard's present ranges; a missing shard holds nothing."""
        present = self.spans if spans is None else spans
        held = present[number] if number < len(present) else ()
        weights, running = part(self.weights, held).clone(), self.running_at(number)
        empty = empty or (without_values if self.weights.is_meta else plain_empty)
        return Shard(number, self.parameters, held, weights, self.service, empty=empty, native=native, running=running)

    def copy(
        self,
        node: int,
        shard: Shard,
        *,
        blank: bool = False,
        on_entry: Callable[[int, Entry], None] | None = None,
        on_save: Callable[[int, Shard], None] | None = None,
    ) -> Node:
        """A copy of a shard on `node`; see `Node`."""
        first, coordinator = self.first_worker(shard.number), self.topology.coordinator
        return Node(
            *(node, shard, coordinator, self.timing),
            blank=blank,
            on_entry=on_entry,
            on_save=on_save,
            first_worker=first,
        )

    def scheduler(
        self, batches_per_epoch: int, num_tickets: int, *, pauses: bool = False, run: int = 1
    ) -> BatchScheduler:
        """Deals so many batches. `pauses`: after each epoch; `run`: see `Batches.run`."""
        service = self.service
        return BatchScheduler(
            batches_per_epoch=batches_per_epoch,
            num_tickets=num_tickets,
            deals=service.deals,
            workers=len(self.topology.firsts),
            warm_start=service.warm_start,
            most_held=_MOST_HELD,
            rests=service.waits,
            pauses=pauses,
            run=run,
        )

    def coordinator(
        self,
        scheduler: BatchScheduler,
        listeners: Listeners,
        evaluator: int | None = None,
        incarnation: int | None = None,
    ) -> Coordinator:
        """The coordinator of all nodes. `incarnation`: the present one, if the plan's is not."""
        topology = self.topology
        return Coordinator(
            Nodes(topology.coordinator, topology.firsts, topology.chains, evaluator),
            scheduler,
            self.timing,
            incarnation=self.incarnation if incarnation is None else incarnation,
            listeners=listeners,
            reshaper=Reshaper(self.parameters, self.spans),
        )


def timing_of_processes(weights: Tensor, timeout_s: float) -> Timing:
    """Timeouts between processes with shards of `weights`: a copy says nothing during an update."""
    return Timing(deadline_s=timeout_s).of_processes(weights.nbytes / _SLOWLY_BYTES_PER_S)
