"""Runs a strategy that has a parameter server, with the harness' tiny model, in the virtual world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from laws.harness import OPTIMIZERS, Setting, flat, joined_batch, model
from polytempo.cluster import Cluster, Link, Stragglers
from polytempo.cluster import constant as in_time
from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.data.batches import Batches
from polytempo.runs.served import tally as engine
from polytempo.runs.simulated.simulate import simulate
from polytempo.server.message import Statistics
from polytempo.spec.job import Data, Job
from polytempo.spec.result import Result
from polytempo.training.served.worker_program import Attendance

SAMPLES, BATCH = 96, 4
NUM_BATCHES = SAMPLES // BATCH


@dataclass
class Seen:
    """The results of a run, and its report's sources."""

    result: Result
    weights: Tensor
    """The final ones, shape (numel,)."""
    statistics: Sequence[Statistics] = ()
    """Each shard's statistics."""
    attendances: Sequence[Attendance] = ()
    """Each worker's attendance."""


@dataclass
class Runner:
    """Runs strategies, and keeps the engine's counts."""

    facts: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(
        self,
        strategy: Strategy,
        workers: int,
        steps: int = NUM_BATCHES,
        setting: Setting = Setting(),
        stragglers: Stragglers = in_time(),
        seed: int = 0,
    ) -> Seen:
        """`steps` batches in all, whoever takes them. The weights are every worker's at the end."""
        models: list[nn.Module] = []
        assert steps % workers == 0
        cluster = Cluster(Link(1e-5, 1e9), flops_per_s=1e7, stragglers=stragglers)
        result = simulate(job_of(setting, models), strategy, workers, cluster, steps=steps // workers, seed=seed)
        final = [flat(each) for each in models[1:]]
        assert len(final) == workers
        assert all(torch.equal(each, final[0]) for each in final)
        return Seen(result, final[0], *self.facts.pop())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner."""
    runner, facts_of = Runner(), engine.facts_of

    def spy(service: Service, statistics: Any, attendances: Any, bytes_sent: int) -> dict[str, Any]:
        runner.facts.append((statistics, attendances))
        return facts_of(service, statistics, attendances, bytes_sent)

    monkeypatch.setattr(engine, "facts_of", spy)
    return runner


def data_of(dtype: torch.dtype) -> TensorDataset:
    """Four joined batches of the harness: 96 samples."""
    inputs, targets = zip(*(joined_batch(step, dtype) for step in range(SAMPLES // 24)), strict=True)
    return TensorDataset(torch.cat(inputs), torch.cat(targets))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The harness' loss."""
    return ((outputs - targets) ** 2).sum(1).mean()


def job_of(setting: Setting, models: list[nn.Module]) -> Job:
    """The tiny job. Every model that it makes is put into `models`: first the run's own, then each worker's."""

    def make() -> nn.Module:
        models.append(model(setting.dtype))
        return models[-1]

    return Job(
        model=make,
        data=lambda folder: Data(data_of(setting.dtype)),
        loss=loss,
        optimizer=lambda parameters, lr: OPTIMIZERS[setting.optimizer](parameters),
        batch_size=BATCH,
    )


def batches_of(steps: int, setting: Setting, batch_size: int = BATCH, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """One worker's batches."""
    batches = Batches(data_of(setting.dtype), size=1, batch_size=batch_size, seed=seed)
    for step in range(steps):
        yield batches.at(*divmod(step, len(batches)))


def serviced(strategy: Strategy, **changes: Any) -> Strategy:
    """The strategy with another service: more shards, say."""
    assert strategy.server is not None
    return replace(strategy, meeting=replace(strategy.server, **changes))
