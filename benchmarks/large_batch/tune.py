"""Does `polytempo tune batch` find what a grid search finds, for a twentieth of its cost?

    python benchmarks/large_batch/tune.py digits --seeds 3
    python benchmarks/large_batch/tune.py mnist --data FOLDER --seeds 1
    python benchmarks/large_batch/tune.py chars --data FOLDER --seeds 3 --budget 0.5 --grid points.json

Samples to the target loss on the test set, over a grid of global batches and rates, and with the advice for 2, 8 and 32
workers. Each run is one process on the batch of all workers, with synchronous SGD's gradient; with --virtual as many
virtual workers also follow the advice. A run that does not arrive costs the cap. Points in the file of `--grid` are not
run again; new points are added to it. `chars` is tiny Shakespeare with a smaller model and shorter windows than the job
of that name, so that a point takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import Dataset, Subset

import polytempo as pt
from polytempo.data.shard import DataShard
from polytempo.jobs import chars, file_of
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of
from polytempo.training.job.context import check_length
from polytempo.training.tuning.batch_advice import BatchAdvice, advise_batch
from polytempo.training.tuning.trial import Trial

WORKERS = (2, 8, 32)


class Task(NamedTuple):
    """A job, where it is to arrive, and the grid."""

    target: float
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    most_epochs: float
    scores_per_epoch: int
    scored: int | None = None
    """So many test samples, evenly chosen; None: all."""


TASKS = {
    "digits": Task(0.12, (8, 16, 32, 64, 128, 256, 512), tuple(0.005 * 2**k for k in range(8)), 30, 8),
    "mnist": Task(0.10, (16, 32, 64, 128, 256, 512), tuple(0.005 * 2**k for k in range(7)), 3, 8),
    "chars": Task(2.3, (8, 16, 32, 64, 128), tuple(1e-3 * 2**k for k in range(6)), 0.75, 64, scored=250),
}
CONTEXT, WIDTH = 32, 32
"""The task `chars`: characters of a window, numbers for each of them."""


class Outcome(NamedTuple):
    """A run's samples; infinite `to_target`: it did not arrive."""

    to_target: float
    spent: float


class Setting(NamedTuple):
    """The common settings of all runs of one call. `seeds`: so many runs of each point. `length`: an epoch's
    samples."""

    name: str
    job: Job
    data: Data
    task: Task
    seeds: int
    length: int


Point = tuple[int, float]
"""A global batch and a rate."""


def short_windows(given: Path | None) -> Data:
    """The text of the job `chars` in windows of `CONTEXT` characters."""
    return Data(*pt.data.characters(file_of(given, "chars", "input.txt"), CONTEXT))


def job_of(task: str) -> Job:
    """The job of that name; `chars` with one layer of four heads, for one epoch."""
    found = pt.jobs.find(task)
    if task != "chars":
        return found
    small = partial(chars.Transformer, chars.VOCABULARY, CONTEXT, WIDTH, num_heads=4, num_layers=1)
    return replace(found, model=small, data=short_windows, epochs=1)


def outcome(setting: Setting, batch: int, lr: float, seed: int) -> Outcome:
    """A run until its test loss is at the target, or its epochs are over."""
    job, data, task, length = setting.job, setting.data, setting.task, setting.length
    trial = Trial(job, data, batch=batch, lr=lr, seed=seed)
    while trial.samples < task.most_epochs * length and not trial.diverged:
        trial.train(max(batch, length // task.scores_per_epoch))
        if not trial.diverged and trial.test_loss() <= task.target:
            return Outcome(trial.samples, trial.samples)
    return Outcome(math.inf, trial.samples)


def scored_on(data: Data, count: int | None) -> Data:
    """The data with so many of the test samples."""
    if count is None or data.test is None:
        return data
    test = cast("Dataset[Any]", data.test)
    length = len(data.test)  # type: ignore[arg-type]
    return data._replace(test=Subset(test, range(0, length, length // count)))


def known_points(file: Path | None) -> dict[tuple[int, float, int], Outcome]:
    """The grid's earlier runs: by batch, rate and seed."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(batch, lr, seed): Outcome(to_target, spent) for batch, lr, seed, to_target, spent in rows}


def averaged(found: list[Outcome]) -> Outcome:
    """The mean over seeds."""
    return Outcome(statistics.mean(o.to_target for o in found), statistics.mean(o.spent for o in found))


def printed_grid(setting: Setting, file: Path | None) -> dict[Point, Outcome]:
    """The outcome of every point, a printed row a batch. New runs are added to `file`."""
    task, known = setting.task, known_points(file)

    def point(batch: int, lr: float, seed: int) -> Outcome:
        found = known.get((batch, lr, seed))
        if found is None:
            found = outcome(setting, batch, lr, seed)
            if file is not None:
                with file.open("a") as lines:
                    print(json.dumps([batch, lr, seed, *found]), file=lines)
        return found

    print(f"{setting.name}: thousands of samples to a test loss of {task.target:g}, mean of {setting.seeds} seeds")
    print("| batch | " + " | ".join(f"{lr:.3g}" for lr in task.rates) + " |")
    grid: dict[Point, Outcome] = {}
    for batch in task.batches:
        row = {(batch, lr): averaged([point(batch, lr, seed) for seed in range(setting.seeds)]) for lr in task.rates}
        cells = " | ".join(f"{found.to_target / 1e3:.1f}" for found in row.values())
        print(f"| {batch} | {cells} |", flush=True)
        grid |= row
    return grid


def print_advice(setting: Setting, grid: dict[Point, Outcome], workers: int, advice: BatchAdvice) -> None:
    """The row of so many workers: the best point that they can share, and where the advice arrives."""
    points = {point: found for point, found in grid.items() if point[0] >= workers}
    (best_batch, best_lr), best = min(points.items(), key=lambda item: item[1].to_target)
    cost = sum(point.spent for point in points.values())
    arrived = sum(point.spent for point in points.values() if math.isfinite(point.to_target))
    batch, lr = advice.global_batch_size, advice.lr
    own = averaged([outcome(setting, batch, lr, seed) for seed in range(setting.seeds)])
    print(
        f"| {workers} | {best_batch}, {best_lr:.3g}: {best.to_target:,.0f} | {batch}, {lr:.3g} | "
        f"{own.to_target:,.0f} | {own.to_target / best.to_target:.2f} | {100 * advice.samples / cost:.1f} % | "
        f"{100 * advice.samples / arrived:.1f} % |",
        flush=True,
    )
    print(f"  noise scale {advice.noise.first:.0f}, {advice.noise.second:.0f}; range test {advice.range.top:.3g}")
    print("  rates " + ", ".join(f"{each.lr:.3g}: {each.loss:.4g}" for each in advice.tried))


def print_virtual(setting: Setting, workers: int, advice: BatchAdvice, folder: Path | None) -> None:
    """Print the arrival of as many virtual workers by the advice."""
    found = pt.simulate(
        *(setting.job, pt.strategies.sync_sgd(), workers),
        options=pt.RunOptions(
            data=folder,
            global_batch_size=advice.global_batch_size,
            lr=advice.lr,
            epochs=setting.task.most_epochs,
            until={"loss": setting.task.target},
        ),
    )
    said = f"reached {found.reached} after {found.samples:,} samples, scored each epoch"
    print(f"  {workers} virtual workers: {said}")


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.75)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--thin", type=int, default=1, help="of the grid every so many-th batch and rate")
    parser.add_argument("--grid", type=Path, help="a file for the grid's points, one a line")
    return parser.parse_args()


def main() -> None:
    """Print the grid, then the advice beside its best point."""
    given = arguments()
    torch.set_num_threads(1)
    task, job = TASKS[given.task], job_of(given.task)
    task = task._replace(batches=task.batches[:: given.thin], rates=task.rates[:: given.thin])
    data = scored_on(data_of(job, given.data), task.scored)
    length = check_length(DataShard(data.training(), rank=0, size=1, batch_size=1))
    setting = Setting(given.task, job, data, task, given.seeds, length)
    grid = printed_grid(setting, given.grid)
    print("\n| workers | best of the grid | advice | samples | beside the best | cost: of the grid, of its arrivals |")
    for workers in WORKERS:
        advice = advise_batch(job, data, workers=workers, budget=given.budget, seed=100)
        print_advice(setting, grid, workers, advice)
        if given.virtual:
            print_virtual(setting, workers, advice, given.data)


if __name__ == "__main__":
    main()
