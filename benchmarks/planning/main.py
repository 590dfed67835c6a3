"""A plan beside the truth: every run of a grid is made, and the plan's first choice compared with the best of them.

    python benchmarks/planning/main.py                        the grid under the virtual clock, in some minutes
    python benchmarks/planning/main.py --namespaces h0 h1 h2 h3 --address 10.0.0.1         on processes, between hosts

Regret: how much longer the first choice really takes than the fastest run of the grid. Coverage: the share of runs with
a time in the plan's interval, for nine in ten. A run's time ends when it reaches the target; each cell has `--repeats`
runs, with seeds that the plan did not use, and the cell's truth is their median.

Between hosts: run it as root in the first of four network namespaces. The hosts are calibrated first; the processes of
each host get a PID namespace of their own, so no memory is shared between hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import polytempo as pt
from polytempo.cluster import Cluster
from polytempo.cluster.cluster_file import JOB
from polytempo.core import PolytempoError
from polytempo.planner.plan import RunPlan
from polytempo.planner.search import plan_run
from polytempo.planner.search_space import PlannedRun, SearchSpace
from polytempo.runs.calibration.calibrate import calibrate
from polytempo.runs.calibration.earlier import compared
from polytempo.runs.calibration.job_pace import with_pace
from polytempo.spec.run_options import RunOptions
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy

STRATEGIES = (
    "sync_sgd()",
    "bf16_sgd()",
    "one_bit_sgd()",
    "power_sgd(rank=2)",
    "local_sgd(period=4)",
    "local_sgd(period=16)",
)
BATCHES = (16, 64)
WORKERS = {"virtual": (4, 16), "hosts": (2, 4)}
CLUSTERS = ("ethernet(gbit_per_s=0.1)", "ethernet(gbit_per_s=1)", "ethernet(gbit_per_s=10)")
_FIRST_SEED = 1000
_PATIENCE = 8
"""A run that has not reached the target after so many times the job's epochs never does."""

Measure = Callable[[PlannedRun, int], float | None]


class Cell(NamedTuple):
    """A run of the grid, and the seconds that it took."""

    run: PlannedRun
    seconds: list[float]
    """Infinite where the target was not reached."""

    @property
    def truth(self) -> float:
        """The median."""
        return statistics.median(self.seconds)


def main() -> None:
    """Plan, make all runs of the grid, and print a table for each cluster."""
    asked = arguments()
    torch.set_num_threads(1)
    job, until = pt.jobs.find(asked.job), {"accuracy": asked.accuracy}
    if asked.namespaces:
        engine = pt.engines.ssh(
            hosts=asked.namespaces,
            command=("ip", "netns", "exec", "{host}", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            python=sys.executable,
            address=asked.address,
        )
        found = calibrate(engine, "hosts", len(asked.namespaces))
        if asked.earlier is not None:
            found, change = compared(found, asked.earlier)
            print(f"since {asked.earlier.name}: {change}")
        cluster, error = with_pace(found.cluster, engine, job, len(asked.namespaces), RunOptions())
        found = found._replace(spread=found.spread | {JOB: error})
        print(f"calibrated: {cluster.network}, spread {found.spread}, {cluster.speeds and cluster.speeds.jobs}")
        compare(job, until, cluster, found.spread, WORKERS["hosts"], real(job, until, engine), asked)
        return
    for text in CLUSTERS:
        cluster = parse_cluster(text)
        compare(job, until, cluster, {}, WORKERS["virtual"], virtual(job, until, cluster), asked)


def compare(
    job: pt.Job,
    until: dict[str, float],
    cluster: Cluster,
    spread: dict[str, float],
    workers: tuple[int, ...],
    measure: Measure,
    asked: argparse.Namespace,
) -> None:
    """One plan and one grid."""
    space = SearchSpace(STRATEGIES, workers, BATCHES)
    began = time.perf_counter()
    plan = plan_run(job, space, until, cluster, spread=spread)
    print(f"\n{cluster.name}: planned in {time.perf_counter() - began:.0f} s, {len(plan.trials)} trials", flush=True)
    cells = [Cell(run, []) for run in space.runs()[0]]
    for repeat in range(asked.repeats):  # in turns, so that a busy minute is spread over all
        for cell in cells:
            taken = measure(cell.run, _FIRST_SEED + repeat)
            print(f"{cell.run}: {'not reached' if taken is None else f'{taken:.3g} s'}", file=sys.stderr, flush=True)
            cell.seconds.append(float("inf") if taken is None else taken)
    tell(plan, cells)


def tell(plan: RunPlan, cells: list[Cell]) -> None:
    """The table of the grid, the regret and the coverage."""
    assert plan.winner is not None
    forecasts = {each.run: each for each in plan.forecasts}
    print("| run | predicted s | interval | taken s | least, most |\n|---|---|---|---|---|")
    inside = finished = 0
    for cell in sorted(cells, key=lambda each: each.truth):
        found = forecasts.get(cell.run)
        taken = f"{cell.truth:.3g} | {min(cell.seconds):.3g}, {max(cell.seconds):.3g}"
        if found is None:
            print(f"| {cell.run} | given up | | {taken} |")
            continue
        print(f"| {cell.run} | {found.seconds:.3g} | {found.low_s:.3g}, {found.high_s:.3g} | {taken} |")
        reached = [each for each in cell.seconds if each < float("inf")]
        finished += len(reached)
        inside += sum(found.low_s <= each <= found.high_s for each in reached)
    truth = {cell.run: cell.truth for cell in cells}
    best = min(truth, key=truth.__getitem__)
    regret = truth[plan.winner.run] / truth[best] - 1
    print(f"\nchosen {plan.winner.run}: {truth[plan.winner.run]:.3g} s; best {best}: {truth[best]:.3g} s")
    print(f"regret {regret:.0%}; {inside} of {finished} runs in their intervals, {inside / max(1, finished):.0%}")
    print(f"{len(cells) - len(forecasts)} of {len(cells)} cells given up by the plan", flush=True)


def virtual(job: pt.Job, until: dict[str, float], cluster: Cluster) -> Measure:
    """Runs with real gradients under the virtual clock."""

    def seconds(run: PlannedRun, seed: int) -> float | None:
        epochs = _PATIENCE * job.epochs
        try:
            result = pt.simulate(
                *(job, parse_strategy(run.strategy), run.workers, cluster),
                batch_size=run.batch_size,
                until=until,
                epochs=epochs,
                seed=seed,
                threads=1,
            )
        except PolytempoError:
            return None
        return result.seconds if result.reached else None

    return seconds


def real(job: pt.Job, until: dict[str, float], engine: Any) -> Measure:
    """Runs on processes of the engine's hosts."""

    def seconds(run: PlannedRun, seed: int) -> float | None:
        result = pt.run(
            *(job, parse_strategy(run.strategy), run.workers),
            engine=engine,
            batch_size=run.batch_size,
            until=until,
            epochs=_PATIENCE * job.epochs,
            seed=seed,
            threads=1,
        )
        return result.seconds if result.reached else None

    return seconds


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="digits")
    parser.add_argument("--accuracy", type=float, default=0.97)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--namespaces", nargs="+", help="network namespaces, the first one with this process")
    parser.add_argument("--earlier", type=Path, help="a file of these hosts that was calibrated before")
    parser.add_argument("--address", help="of the first, as the others reach it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
