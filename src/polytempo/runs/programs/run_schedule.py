"""`schedule`: a scheduled program on worker processes of this host, or under the virtual clock."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from polytempo.cluster import Cluster
from polytempo.core import Port
from polytempo.engines.collective import collected
from polytempo.engines.engine import Launch, Role
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.capacity import check_processes
from polytempo.partition.scheduled import ScheduledJob, SweepReport, performed
from polytempo.runs.frame.live_run import ShownRun
from polytempo.runs.frame.run_frame import framed_program, torch_threads
from polytempo.spec.topology import Topology
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
    tolerance: float = 0.0

    @property
    def converged(self) -> bool | None:
        """True where the error is at most the tolerance. None: the program has no error."""
        return None if self.last.error is None else self.last.error <= self.tolerance

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
    out: Path | None = None,
) -> ScheduledFit:
    """Perform a scheduled program with so many workers, until its error is at most `tolerance` or for `sweeps` sweeps.

        x, y = pt.data.scheduled.correlated(rows=500, columns=1000)
        fit = pt.schedule(pt.partition.scheduled.lasso(l1=0.02), (x, y), workers=2)
        fit.parameters["weights"], fit.last.objective

    Workers are processes of this host with a thread each; with a `cluster` they are virtual, and so are seconds: then
    `seed` draws the stragglers. Both reach the same bits. Each worker keeps its part of `data` in float64 beside it.
    Measuring changes nothing and counts in no seconds. Nothing is saved on the way: a run that ends early is lost.
    `out` is a folder for processes: `live.json` (`polytempo top`), `logs/`, and at the end `metrics.jsonl` with a row
    of each sweep.

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
            fit = _on_processes(program, rank, ShownRun(str(program), "schedule", workers, sweeps), timeout_s, out)
            return replace(fit, tolerance=tolerance)
        outcome = VirtualWorld(cluster, workers, seed=seed).run(rank)
    each = [worker for worker in outcome.results if worker is not None]
    sent = sum(outcome.trace.bytes_sent.values())
    return replace(_fit(program, cluster.name, each, sent, outcome.trace.hash), tolerance=tolerance)


def _on_processes(
    program: ScheduledJob, rank: Any, shown: ShownRun, timeout_s: float, out: Path | None
) -> ScheduledFit:
    def work(role: Role) -> dict[str, Any]:
        world = init(timeout_s=timeout_s, device="cpu", quiet=True)
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

    check_processes(shown.workers, shown.workers)
    with framed_program(shown, out) as frame:
        engine = frame.opened(Local(), Launch(work, None, dict, shown.workers, shown.workers, 1))
        answers = collected(engine, Topology.collective(shown.workers))
        for sweep in answers[0]["sweeps"]:
            report = SweepReport(*sweep)
            frame.record({"kind": "train", "step": report.sweep, "loss": report.objective, **report._asdict()})
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
