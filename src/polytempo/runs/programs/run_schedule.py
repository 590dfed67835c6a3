"""`schedule`: a scheduled program on worker processes of this host, or under the virtual clock."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from polytempo.cluster import Cluster
from polytempo.core import Port
from polytempo.engines.join.init import init
from polytempo.engines.launch import launch
from polytempo.engines.processes.failures import diverged
from polytempo.engines.processes.worker import RankInfo
from polytempo.partition.scheduled import ScheduledJob, SweepReport, performed
from polytempo.runs.frame.run_frame import torch_threads
from polytempo.worlds import VirtualWorld
from polytempo.worlds.trace import combined_hash


@dataclass(frozen=True)
class ScheduledFit:
    """The answer of `schedule`."""

    program: str
    world: str
    """ "processes", or the cluster's name."""
    workers: int
    parameters: Mapping[str, Tensor]
    """The whole learned tensors, by the program's names."""
    sweeps: Sequence[SweepReport]
    """The measures at the beginning and after each sweep."""
    bytes_sent_per_rank: float
    trace_hash: str

    @property
    def last(self) -> SweepReport:
        """The last measure."""
        return self.sweeps[-1]


class _Worker(NamedTuple):
    """The answer of one worker."""

    sweeps: list[SweepReport]
    parameters: dict[str, Tensor]
    divided: frozenset[str]


def schedule(
    program: ScheduledJob,
    data: Sequence[object],
    workers: int = 2,
    *,
    sweeps: int = 100,
    tolerance: float = 1e-6,
    cluster: Cluster | None = None,
    seed: int = 0,
    timeout_s: float = 300.0,
) -> ScheduledFit:
    """Perform a scheduled program with so many workers, until its error is at most `tolerance` or for `sweeps` sweeps.

        x, y = pt.data.scheduled.correlated(rows=500, columns=1000)
        fit = pt.schedule(pt.partition.scheduled.lasso(l1=0.02), (x, y), workers=2)
        fit.parameters["weights"], fit.last.objective

    Workers are processes of this host with a thread each; with a `cluster` they are virtual, and so are seconds: then
    `seed` draws the stragglers. Both reach the same bits. Each worker keeps its part of `data` in float64 beside it.
    Measuring changes nothing and counts in no seconds. Nothing is saved on the way: a run that ends early is lost.

    Errors: ValueError for settings and data that no run can have, `NotFinite` where updates of one round interfere
    so that the objective has no bound, `WorkerDied` where a process fails.
    """
    if workers < 1 or sweeps < 1 or not tolerance >= 0:
        raise ValueError(
            f"workers and sweeps must be at least 1 and tolerance at least 0; got {workers}, {sweeps}, {tolerance:g}"
        )
    given = tuple(data)
    program.check(given)

    async def rank(port: Port) -> _Worker:
        begun = await program.begin(port, given)
        reports = await performed(port, begun, sweeps=sweeps, tolerance=tolerance)
        return _Worker(reports, dict(begun.parameters()), begun.divided)

    with torch_threads():  # sums of several threads have other bits
        if cluster is None:
            return _on_processes(program, rank, workers, timeout_s)
        outcome = VirtualWorld(cluster, workers, seed=seed).run(rank)
    each = [worker for worker in outcome.results if worker is not None]
    sent = sum(outcome.trace.bytes_sent.values())
    return _fit(program, cluster.name, each, sent, outcome.trace.hash)


def _on_processes(program: ScheduledJob, rank: Any, workers: int, timeout_s: float) -> ScheduledFit:
    def work(info: RankInfo) -> dict[str, Any]:
        world = init(timeout_s=timeout_s, quiet=True)
        world.begin()
        worker = world.drive(rank(world.port))
        tensors = {name: tensor.contiguous() for name, tensor in worker.parameters.items()}
        return {
            "sweeps": worker.sweeps,
            "parameters": base64.b64encode(safetensors.torch.save(tensors)).decode(),
            "divided": sorted(worker.divided),
            "sent": sum(world.trace.bytes_sent.values()),
            "hash": world.trace.hash,
        }

    with diverged():
        answers = launch(work, workers, threads=1)
    each = [
        _Worker(
            [SweepReport(*report) for report in answer["sweeps"]],
            safetensors.torch.load(base64.b64decode(answer["parameters"])),
            frozenset(answer["divided"]),
        )
        for answer in answers
    ]
    sent, trace_hash = sum(answer["sent"] for answer in answers), combined_hash(answer["hash"] for answer in answers)
    return _fit(program, "processes", each, sent, trace_hash)


def _fit(program: ScheduledJob, world: str, each: Sequence[_Worker], sent: int, trace_hash: str) -> ScheduledFit:
    first = each[0]
    parameters = {
        name: torch.cat([worker.parameters[name] for worker in each]) if name in first.divided else tensor
        for name, tensor in first.parameters.items()
    }
    return ScheduledFit(str(program), world, len(each), parameters, first.sweeps, sent / len(each), trace_hash)
