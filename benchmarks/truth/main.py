"""Predicted beside measured: `polytempo simulate --cluster cluster.toml` and the same runs on real processes.

    polytempo calibrate --workers 2 --out cluster.toml
    python benchmarks/truth/main.py --cluster cluster.toml --workers 2 [--job small] [--repeats 3] [--only native ring]

Between hosts: --hosts h0 h1 --address 10.0.0.1 --command 'ip netns exec {host} unshare --pid --fork --kill-child
--mount-proc', as for `pt.engines.ssh`; with --calibrate it measures first, and writes the file.

A line for each strategy: milliseconds a step, predicted and measured, and the error, predicted / measured - 1. A step
is a typical one: of steps k, k + 8, … the median, and the mean over k; so steps that something else on this host has
disturbed count no more than others, in both. Beside it the mean step of all runs, with all that disturbs.

With --pace-each-round the job's own pace is measured before each round of runs, as `calibrate --job` does it, and
predicted is the mean over the rounds: a shared machine is faster in one minute than in another.

With --processor the measurement is a worker's time on its processor, from two runs, one of them longer, and the
prediction is the step at full speed: on one host a worker computes or copies, and waits little, so that the two should
be equal. That can be measured while other programs run, which a step's time cannot.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import polytempo as pt
from polytempo.cluster import Cluster, constant
from polytempo.cluster.cluster_file import read_cluster
from polytempo.cluster.measured import to_toml
from polytempo.core import Strategy
from polytempo.jobs import find
from polytempo.report.pages.validation import typical_step_s
from polytempo.report.runs import load_run
from polytempo.runs.calibration.calibrate import calibrate
from polytempo.runs.calibration.job_pace import with_pace
from polytempo.spec.run_options import RunOptions

JOBS = {name: f"{Path(__file__).with_name('job.py')}:{name}" for name in ("job", "small")}
s, c = pt.strategies, pt.collectives
STRATEGIES: dict[str, Strategy] = {
    "native": s.sync_sgd(),
    "local_sgd(8)": s.local_sgd(period=8),
    "ring": s.sync_sgd(route=c.ring),
    "halving_doubling": s.sync_sgd(route=c.halving_doubling),
    "star": s.sync_sgd(route=c.star),
    "one_bit": s.one_bit_sgd(),
    "power_sgd(2)": s.power_sgd(2),
    "top_k(0.01)": s.top_k_sgd(0.01),
    "gossip": s.gossip(),
    "async_sgd": s.async_sgd(),
    "downpour": s.downpour(),
}


def main() -> None:
    """Measure and print the rows of a table."""
    asked = arguments()
    torch.set_num_threads(1)
    engine = engine_of(asked)
    if asked.calibrate:
        name = "local" if asked.hosts is None else "hosts"
        found = calibrate(engine, name, asked.workers)
        paced = with_pace(found.cluster, engine, find(JOBS[asked.job]), asked.workers, RunOptions()).cluster
        Path(asked.cluster).write_text(to_toml(paced, found.measured, found.spread), encoding="utf-8")
    cluster, job = read_cluster(Path(asked.cluster)), find(JOBS[asked.job])
    chosen = {name: STRATEGIES[name] for name in asked.only or STRATEGIES}
    options: dict[str, Any] = {"steps": asked.steps, "epochs": 1000, "threads": 1}
    if asked.processor:
        return on_processor(job, chosen, asked, cluster)
    taken: dict[str, list[Taken]] = {name: [] for name in chosen}
    clusters = [] if asked.pace_each_round else [cluster]
    for _ in range(asked.repeats):  # in turns, so that a busy minute is spread over all
        if asked.pace_each_round:
            clusters.append(with_pace(cluster, engine, job, asked.workers, RunOptions()).cluster)
        for name, strategy in chosen.items():
            run = partial(pt.run, job, strategy, asked.workers, engine=engine, **options)
            taken[name].append(step_of(run))
    errors = []
    print("| strategy | predicted ms | measured ms | least, most | error | mean, predicted and measured |")
    print("|---|---|---|---|---|---|")
    for name, strategy in chosen.items():
        predicted = mean_of(
            [step_of(partial(pt.simulate, job, strategy, asked.workers, c, **options)) for c in clusters]
        )
        typical = [each.typical_ms for each in taken[name]]
        errors.append(predicted.typical_ms / statistics.median(typical) - 1)
        means = f"{predicted.mean_ms:.2f}, {statistics.median(each.mean_ms for each in taken[name]):.2f}"
        print(
            f"| {name} | {predicted.typical_ms:.2f} | {statistics.median(typical):.2f} | "
            f"{min(typical):.2f}, {max(typical):.2f} | {errors[-1]:+.0%} | {means} |",
            flush=True,
        )
    print(f"\nmedian |error| {statistics.median(map(abs, errors)):.0%}, largest {max(map(abs, errors)):.0%}")


def on_processor(job: pt.Job, chosen: dict[str, Strategy], asked: argparse.Namespace, cluster: Cluster) -> None:
    """Print the table of times on processors."""
    cluster, errors = replace(cluster, stragglers=constant()), []
    print("| strategy | predicted ms | on the processor ms | least, most | error |\n|---|---|---|---|---|")
    for name, strategy in chosen.items():
        taken = sorted(processor_ms(job, strategy, asked) for _ in range(asked.repeats))
        found = pt.simulate(job, strategy, asked.workers, cluster, steps=16, epochs=1000, threads=1)
        predicted_ms, measured_ms = 1e3 * found.seconds / found.steps, statistics.median(taken)
        errors.append(predicted_ms / measured_ms - 1)
        spread = f"{taken[0]:.2f}, {taken[-1]:.2f}"
        print(f"| {name} | {predicted_ms:.2f} | {measured_ms:.2f} | {spread} | {errors[-1]:+.0%} |", flush=True)
    print(f"\nmedian |error| {statistics.median(map(abs, errors)):.0%}, largest {max(map(abs, errors)):.0%}")


def processor_ms(job: pt.Job, strategy: Strategy, asked: argparse.Namespace) -> float:
    """Milliseconds on its processor that a worker takes for a step."""
    taken = []
    for steps in (16, 16 + asked.steps):
        before_s = children_s()
        pt.run(job, strategy, asked.workers, steps=steps, epochs=1000, threads=1)
        taken.append(children_s() - before_s)
    return 1e3 * (taken[1] - taken[0]) / asked.steps / asked.workers


def children_s() -> float:
    """Seconds on processors of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Taken(NamedTuple):
    """Milliseconds of a run's steps."""

    typical_ms: float
    mean_ms: float


def mean_of(found: list[Taken]) -> Taken:
    """The mean of some predictions."""
    return Taken(*(statistics.fmean(figures) for figures in zip(*found, strict=True)))


def step_of(run: Callable[..., Any]) -> Taken:
    """The steps of a run with a trace in a folder."""
    with tempfile.TemporaryDirectory(prefix="polytempo-truth-") as folder:
        result = run(out=Path(folder) / "run")
        events = load_run(Path(folder) / "run").events
    return Taken(1e3 * typical_step_s(events), 1e3 * result.seconds / result.steps)


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="cluster.toml")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--job", choices=JOBS, default="job")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=STRATEGIES)
    parser.add_argument("--hosts", nargs="+")
    parser.add_argument("--address", help="of this host, as the others reach it")
    parser.add_argument("--command", help="that starts a process on {host}")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--pace-each-round", action="store_true")
    parser.add_argument("--processor", action="store_true")
    return parser.parse_args()


def engine_of(asked: argparse.Namespace) -> Any:
    """This host's processes, or the named hosts'."""
    if asked.hosts is None:
        return pt.engines.local()
    command = tuple(shlex.split(asked.command))
    return pt.engines.ssh(hosts=asked.hosts, command=command, python=sys.executable, address=asked.address)


if __name__ == "__main__":
    main()
