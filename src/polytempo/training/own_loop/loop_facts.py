"""`LoopFacts`: a parameter server's knowledge of a training loop, as values. No function of the loop travels.

rank 0    model, optimizer, strategy ──▶ LoopFacts ── JSON and vectors ──▶ the server's processes
every rank                          the same arithmetic: the nodes, and each shard's parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.rule import UpdateRule
from polytempo.server.coordinator.saved_schedule import LIVES
from polytempo.server.layout import Parameter
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.spec.topology import Topology
from polytempo.training.model.running_statistics import Running
from polytempo.training.served.server_plan import PlannedStage, ServerPlan, timing_of_processes
from polytempo.training.served.shard_rule import flat_of, parameters_of, shard_rule_of

_MOST_RESTARTS = 20
LOOP_FORMAT = "polytempo-loop-facts 1"
_PLAIN = (
    *("strategy", "allow_nan", "batches_per_epoch", "timeout_s", "first_epoch", "servers", "passed_bytes"),
    *("epochs_done", "generation", "in_a_row"),
)
"""Fields that JSON takes as they are."""


@dataclass(frozen=True, eq=False)
class LoopFacts:
    """A loop of `workers` ranks with parameters at a server."""

    strategy: str
    hosts: tuple[int, ...]
    """The host of each rank; the server is on rank 0's."""
    parameters: tuple[Parameter, ...]
    rule: UpdateRule
    allow_nan: bool
    batches_per_epoch: int
    timeout_s: float
    weights: Tensor
    """The parameters' values one after the other, shape (numel,)."""
    running: Tensor | None
    """The running statistics of norms, float64; None where the model has none. Of stages: one after the other."""
    first_epoch: int = 0
    servers: int = 0
    """Number of the launcher's processes that hold the shards; 0: rank 0 starts its own."""
    stages: tuple[PlannedStage, ...] = ()
    """Stages of the model; (): every rank has all of it."""
    passed_bytes: int = 0
    """The largest tensor that passes from stage to stage."""
    states: tuple[bytes, ...] = ()
    """The state that each shard begins with (`server.shard.state_copy`); (): with the weights, and nothing else."""
    epochs_done: int = 0
    """The epochs that are in those states."""
    generation: int = 0
    """Number of times that a run has gone on from states."""
    in_a_row: int = 1
    """See `Batches.run`."""

    @property
    def workers(self) -> int:
        """The number of ranks that train."""
        return len(self.hosts)

    @property
    def spread(self) -> bool:
        """True if they are on several hosts."""
        return len(set(self.hosts)) > 1

    @cached_property
    def plan(self) -> ServerPlan:
        """The server, with the optimizer that the strategy's shards apply."""
        strategy, stages = parse_strategy(self.strategy), max(1, len(self.stages))
        service = strategy.server
        assert service is not None, f"{self.strategy} has no parameter server"
        shards = service.shards * (1 if strategy.schedule is not None else stages)
        return ServerPlan(
            replace(service, optimizer=self.rule, allow_nan=self.allow_nan, shards=shards),
            Topology.served(self.workers, shards, service.replicas, hosts=self.hosts, stages=stages),
            self.parameters,
            self.weights,
            self.running,
            timing_of_processes(self.weights, self.timeout_s),
            stages=self.stages,
            passed_bytes=self.passed_bytes,
            spare_lives=_MOST_RESTARTS,
            incarnation=self.generation * LIVES + 1,
        )

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON, without the vectors and the shards' states (`blobs`)."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "format": LOOP_FORMAT,
            "hosts": list(self.hosts),
            "parameters": [list(parameter) for parameter in self.parameters],
            "rule": asdict(self.rule),
            "stages": [list(stage) for stage in self.stages],
            "states": [len(state) for state in self.states],
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
        """The facts from `to_plain` and `blobs`. ValueError for another text."""
        if plain.get("format") != LOOP_FORMAT:
            raise ValueError(f"this text has no facts of a loop ({LOOP_FORMAT}): {str(plain)[:80]}")
        return cls(
            **{name: plain[name] for name in _PLAIN},
            hosts=tuple(plain["hosts"]),
            parameters=tuple(Parameter(*each)._replace(shape=tuple(each[-1])) for each in plain["parameters"]),
            rule=UpdateRule(**{**plain["rule"], "betas": tuple(plain["rule"]["betas"])}),
            weights=_tensor_of(weights, getattr(torch, plain["dtype"])),
            running=_tensor_of(running, torch.float64) if running else None,
            stages=tuple(PlannedStage(tuple(names), running) for names, running in plain["stages"]),
            states=tuple(_split(states, plain["states"])),
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
    in_a_row: int = 1,
) -> LoopFacts:
    """The facts of a loop as it stands. Errors: ValueError for settings that a server does not support."""
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
        in_a_row=in_a_row,
    )


def _split(blob: bytes, lengths: Sequence[int]) -> list[bytes]:
    ends = list(accumulate(lengths))
    return [blob[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor_of(blob: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype) if blob else torch.empty(0, dtype=dtype)
