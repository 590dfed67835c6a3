"""`Pricer`: a run's samples a second by a priced simulation, without values, with one rank for all equal ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from polytempo.cluster import Cluster
from polytempo.core import Bundle, Strategy
from polytempo.core.transform import cost_of
from polytempo.partition.cut import Cut
from polytempo.planner.by_speed import dealt_by_speed, parts_by_speed
from polytempo.planner.search_space import PlannedRun
from polytempo.runs.frame.job_memory import WorkerMemory, estimated, estimated_stage
from polytempo.runs.simulated.simulate import simulate
from polytempo.runs.simulated.simulation_checks import needs_values
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.parts.staged_training import cut_of
from polytempo.training.pipeline.pipeline_stage import schedule_of
from polytempo.training.step.job_profile import profiled

_FEWEST_STEPS = 4
_MOST_PERIOD = 64


class RunPrice(NamedTuple):
    """The result of a priced simulation of a run."""

    samples_per_s: float
    step_s: float
    communication_share: float


class Pricer:
    """Prices of one job on one cluster. Each is computed once."""

    def __init__(self, job: Job, data: str | Path | None, cluster: Cluster) -> None:
        held = data_of(job, data)
        self.job, self.data, self.cluster = with_data(job, held), held, cluster
        with torch.device("meta"):
            model = model_of(job)
        self._bundle = Bundle({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
        self._saved_bytes: float | None = None
        self._found: dict[tuple[object, ...], RunPrice] = {}
        self._memory: dict[tuple[object, ...], int] = {}
        self._cuts: dict[tuple[int, int], Cut] = {}
        """(Number of parts, batch size) -> cut."""

    def price(self, run: PlannedRun, *, rounds: int = 1, network_factor: float = 1.0) -> RunPrice:
        """The price of the run, for at least `rounds` times its period, on links that are so much faster.

        Cost: 20 to 100 ms for equal ranks; others take some 100 µs a message.
        """
        key = (run, rounds, network_factor)
        if key not in self._found:
            cluster = self.cluster if network_factor == 1.0 else faster_network(self.cluster, network_factor)
            if run.balance == "speed":
                cluster = dealt_by_speed(run, cluster)
            strategy = parse_strategy(run.strategy)
            options = RunOptions(batch_size=run.batch_size, steps=self._steps(strategy, run.workers, rounds), threads=1)
            meta = not needs_values(strategy, options)
            result = simulate(self.job, strategy, run.workers, cluster, options, meta=meta)
            per_step = result.seconds / result.steps
            self._found[key] = RunPrice(result.samples_per_s, per_step, result.communication_share)
        return self._found[key]

    def memory_bytes(self, run: PlannedRun) -> int:
        """The estimated memory of a worker with the largest stage. Layers in parts are counted as whole ones."""
        parts = parts_by_speed(run, self.cluster) if run.balance == "speed" else None
        batch_size = run.batch_size if parts is None else max(parts)
        key = (run.strategy, run.workers, batch_size)
        if key not in self._memory:
            options = RunOptions(batch_size=batch_size)
            spec = RunSpec.of(self.job, parse_strategy(run.strategy), run.workers, options)
            self._memory[key] = self._worker_memory(spec).total
        return self._memory[key]

    def hosts(self, run: PlannedRun) -> int:
        """Paid hosts: the workers' hosts, and the hosts of copies of shards if the cluster has these elsewhere."""
        spec = RunSpec.of(self.job, parse_strategy(run.strategy), run.workers, RunOptions())
        servers = max(0, spec.topology().num_servers - 1)  # the last is the coordinator, in the launcher
        return len(set(replace(self.cluster, servers=servers).hosts(run.workers + servers)))

    def _worker_memory(self, spec: RunSpec) -> WorkerMemory:
        if spec.strategy.schedule is None:
            return estimated(spec, round(self._saved_of_sample() * spec.batch_size))
        schedule = schedule_of(spec.strategy)
        key = (schedule.stages * schedule.parts, spec.batch_size)
        if key not in self._cuts:
            self._cuts[key] = cut_of(spec, model_of(self.job), self.data)
        return estimated_stage(spec, self._cuts[key])

    def _saved_of_sample(self) -> float:
        if self._saved_bytes is None:
            batch_size = self.job.batch_size
            found = profiled(self.job, model_of(self.job), self.data, 0, batch_size)
            self._saved_bytes = found.saved_bytes / found.samples
        return self._saved_bytes

    def _steps(self, strategy: Strategy, workers: int, rounds: int) -> int:
        """Whole periods: at least four steps, so that a server's queues fill, times `rounds`."""
        period = 1
        for transform in (strategy.gradients, strategy.parameters):
            for exchange in cost_of(transform, self._bundle, workers).exchanges:
                period = max(period, min(exchange.steps.period, _MOST_PERIOD))
        return rounds * period * -(-_FEWEST_STEPS // period)


def with_data(job: Job, held: Data) -> Job:
    """The job with data that are read already."""
    return replace(job, data=lambda path: held)


def faster_network(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links between hosts that carry `factor` times as many bytes a second."""
    collectives = tuple(
        (name, replace(link, bytes_per_s=factor * link.bytes_per_s) if name.startswith("network ") else link)
        for name, link in cluster.collectives
    )
    network = replace(cluster.network, bytes_per_s=factor * cluster.network.bytes_per_s)
    return replace(cluster, network=network, collectives=collectives)
