"""`LoopFacts`: all that a parameter server must know of a training loop, as values. No function of the loop travels.

rank 0    model, optimizer, strategy ──▶ LoopFacts ── JSON and vectors ──▶ the server's processes
every rank                          the same arithmetic: which nodes there are, and what each shard holds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.rule import Service, UpdateRule
from polytempo.server.coordinator.saved_schedule import LIVES
from polytempo.server.layout import Parameter, Spans, shard_map
from polytempo.server.stage_layout import stage_spans
from polytempo.server.timing import Timing
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.spec.topology import Topology
from polytempo.training.model.running_statistics import Running
from polytempo.training.served.shard_rule import flat_of, parameters_of, shard_rule_of

_SLOWLY_BYTES_PER_S = 100e6
"""A copy is not thought dead for touching its parameters at this rate."""
_MOST_RESTARTS = 20
"""So many copies may take another one's place."""
LOOP_FORMAT = "polytempo-loop-facts 1"
"""Its `format` tells this text from others."""


class LoopStage(NamedTuple):
    """What a server must know of one stage of a model that is cut."""

    parameters: tuple[str, ...]
    """The names of its trained parameters, in the order in which its ranks push them."""
    running: int
    """How many numbers the running statistics of its norms are."""


@dataclass(frozen=True, eq=False)
class LoopFacts:
    """A loop of `workers` ranks whose parameters are at a server."""

    strategy: str
    hosts: tuple[int, ...]
    """The host of each rank; the server is on rank 0's."""
    parameters: tuple[Parameter, ...]
    rule: UpdateRule
    """What the shards apply."""
    allow_nan: bool
    batches_per_epoch: int
    timeout_s: float
    weights: Tensor
    """The parameters' values one after the other, shape (numel,)."""
    running: Tensor | None
    """The running statistics of norms, float64; None where the model has none. Of stages: one after the other."""
    first_epoch: int = 0
    """The epoch of the data that the run begins with."""
    servers: int = 0
    """How many of the launcher's processes hold the shards; 0: those that rank 0 starts beside itself."""
    stages: tuple[LoopStage, ...] = ()
    """Where the model is cut; (): every rank has all of it."""
    passed_bytes: int = 0
    """The largest tensor that passes from stage to stage."""
    states: tuple[bytes, ...] = ()
    """The state that each shard begins with (`server.shard.state_copy`); (): with the weights, and nothing else."""
    epochs_done: int = 0
    """The epochs that are in those states."""
    generation: int = 0
    """How often a run has gone on from states."""

    @property
    def workers(self) -> int:
        """How many ranks train."""
        return len(self.hosts)

    @property
    def spread(self) -> bool:
        """Whether they are on several hosts."""
        return len(set(self.hosts)) > 1

    @cached_property
    def service(self) -> Service:
        """What the strategy says about its server, with the optimizer that the shards apply."""
        strategy = parse_strategy(self.strategy)
        service, times = strategy.server, 1 if strategy.schedule is not None else max(1, len(self.stages))
        assert service is not None, f"{self.strategy} has no parameter server"
        return replace(service, optimizer=self.rule, allow_nan=self.allow_nan, shards=times * service.shards)

    @cached_property
    def topology(self) -> Topology:
        """The nodes by number."""
        counts = self.service.shards, self.service.replicas
        return Topology.served(self.workers, *counts, hosts=self.hosts, stages=max(1, len(self.stages)))

    @property
    def incarnation(self) -> int:
        """The first life of every rank: above all that shards with these states have known."""
        return self.generation * LIVES + 1

    @property
    def most_lives(self) -> int:
        """How many nodes there may be in all, with those that take another one's place."""
        return self.topology.num_nodes + _MOST_RESTARTS + 1

    @property
    def node_hosts(self) -> list[int]:
        """The host of each node."""
        return [self.topology.host_of(node) for node in range(self.most_lives)]

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """What each shard holds."""
        if not self.stages:
            return shard_map(self.parameters, self.service.shards)
        each = self.service.shards // len(self.stages)
        own = [self.parameters_of(stage) for stage in range(len(self.stages))]
        return tuple(shard.whole for some in own for shard in stage_spans(self.parameters, some, each))

    def parameters_of(self, stage: int) -> tuple[Parameter, ...]:
        """Those of a stage, in the order in which its ranks push them."""
        known = {parameter.name: parameter for parameter in self.parameters}
        return tuple(known[name] for name in self.stages[stage].parameters)

    def of_rank(self, rank: int) -> tuple[tuple[Parameter, ...], tuple[Spans, ...]]:
        """The parameters that a rank pushes, and of each shard what it holds of their vector."""
        if not self.stages:
            return self.parameters, self.spans
        stage, each = self.topology.stage_of(rank), self.service.shards // len(self.stages)
        own = self.parameters_of(stage)
        found = [shard.own for shard in stage_spans(self.parameters, own, each)]
        before, behind = stage * each, self.service.shards - (stage + 1) * each
        return own, ((),) * before + tuple(found) + ((),) * behind

    def running_of(self, shard: int) -> Tensor | None:
        """The running statistics that a shard begins with."""
        if not self.stages or self.running is None:
            return self.running
        stage = shard * len(self.stages) // self.service.shards
        found = self.running.split([each.running for each in self.stages])[stage]
        return found if len(found) else None

    def first_worker(self, shard: int) -> int:
        """The rank of the first worker that a shard serves; the others follow it."""
        stages = self.topology.stages
        return shard * stages // self.service.shards * len(self.topology.firsts)

    @property
    def timing(self) -> Timing:
        """How long the processes wait for each other."""
        return Timing(deadline_s=self.timeout_s).of_processes(self.weights.nbytes / _SLOWLY_BYTES_PER_S)

    @property
    def mail_bytes(self) -> int:
        """The largest tensors that any message carries, in all."""
        return max(self.passed_bytes, (2 * self.workers + 8) * self.weights.nbytes)

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it, but for the values of the vectors and the shards' states (`blobs`)."""
        return {
            "format": LOOP_FORMAT,
            "strategy": self.strategy,
            "hosts": list(self.hosts),
            "parameters": [list(parameter) for parameter in self.parameters],
            "rule": asdict(self.rule),
            "allow_nan": self.allow_nan,
            "batches_per_epoch": self.batches_per_epoch,
            "timeout_s": self.timeout_s,
            "first_epoch": self.first_epoch,
            "servers": self.servers,
            "stages": [list(stage) for stage in self.stages],
            "passed_bytes": self.passed_bytes,
            "states": [len(state) for state in self.states],
            "epochs_done": self.epochs_done,
            "generation": self.generation,
            "dtype": str(self.weights.dtype).removeprefix("torch."),
            "sizes": [len(blob) for blob in self.blobs],
        }

    @cached_property
    def blobs(self) -> tuple[bytes, bytes, bytes]:
        """The bytes of weights, running statistics, and the shards' states one after the other."""
        running = b"" if self.running is None else _bytes_of(self.running)
        return _bytes_of(self.weights), running, b"".join(self.states)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], weights: bytes, running: bytes, states: bytes) -> LoopFacts:
        """What `to_plain` and `blobs` gave. ValueError for another text."""
        if plain.get("format") != LOOP_FORMAT:
            raise ValueError(f"these are no facts of a loop ({LOOP_FORMAT}): {str(plain)[:80]}")
        return cls(
            strategy=plain["strategy"],
            hosts=tuple(plain["hosts"]),
            parameters=tuple(_parameter(*each) for each in plain["parameters"]),
            rule=UpdateRule(**{**plain["rule"], "betas": tuple(plain["rule"]["betas"])}),
            allow_nan=plain["allow_nan"],
            batches_per_epoch=plain["batches_per_epoch"],
            timeout_s=plain["timeout_s"],
            weights=_tensor_of(weights, getattr(torch, plain["dtype"])),
            running=_tensor_of(running, torch.float64) if running else None,
            first_epoch=plain["first_epoch"],
            servers=plain["servers"],
            stages=tuple(LoopStage(tuple(names), running) for names, running in plain["stages"]),
            passed_bytes=plain["passed_bytes"],
            states=tuple(_split(states, plain["states"])),
            epochs_done=plain["epochs_done"],
            generation=plain["generation"],
        )


def facts_of_loop(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    *,
    hosts: tuple[int, ...],
    batches_per_epoch: int,
    timeout_s: float,
    allow_nan: bool,
    first_epoch: int = 0,
    servers: int = 0,
) -> LoopFacts:
    """The facts of a loop as it stands. Errors: ValueError for what a server cannot do."""
    assert strategy.server is not None
    return LoopFacts(
        strategy=str(strategy),
        hosts=hosts,
        parameters=parameters_of(model, optimizer, strategy),
        rule=shard_rule_of(strategy.server, optimizer),
        allow_nan=allow_nan,
        batches_per_epoch=batches_per_epoch,
        timeout_s=timeout_s,
        weights=flat_of(model, optimizer).cpu(),
        running=Running(model).vector(),
        first_epoch=first_epoch,
        servers=servers,
    )


def _parameter(name: str, numel: int, group: int, row_width: int, shape: Sequence[int]) -> Parameter:
    return Parameter(name, numel, group, row_width, tuple(shape))


def _split(blob: bytes, lengths: Sequence[int]) -> list[bytes]:
    ends = list(accumulate(lengths))
    return [blob[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor_of(blob: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype) if blob else torch.empty(0, dtype=dtype)
