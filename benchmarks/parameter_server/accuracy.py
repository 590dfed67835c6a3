"""The learning of strategies with a parameter server: real processes, against synchronous SGD on as many samples.

    python benchmarks/parameter_server/accuracy.py [--jobs digits mnist] [--workers 4] [--seeds 3] [--epochs N]

All have the job's own learning rate (Downpour's Adagrad has its own), batches, epochs and schedule, and the servers
have two shards. The rows are medians over the seeds. MNIST is looked for where `POLYTEMPO_DATA` says, or in
`shared/data` beside the repository.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.core import Strategy
from polytempo.jobs import find
from polytempo.spec.result import Result

SHARDS = 2
STRATEGIES = [
    pt.strategies.sync_sgd(),
    pt.strategies.backup_workers(backups=1, shards=SHARDS),
    pt.strategies.softsync(n=1, shards=SHARDS),
    pt.strategies.softsync(n=2, shards=SHARDS),
    pt.strategies.ssp(bound=3, shards=SHARDS),
    pt.strategies.async_sgd(shards=SHARDS),
    pt.strategies.async_sgd(shards=SHARDS, rate=1.0),
    pt.strategies.dc_asgd(shards=SHARDS),
    pt.strategies.staleness_aware(shards=SHARDS),
    pt.strategies.staleness_aware(shards=SHARDS, scale=pt.power(2)),
    pt.strategies.async_sgd(shards=SHARDS, scale=pt.power(0.5)),
    *[pt.strategies.downpour(shards=SHARDS, lr=lr) for lr in (0.01, 0.02)],
    pt.strategies.easgd(shards=SHARDS),
]
"""The first is the base of the comparison."""
COLUMNS = [
    "strategy",
    "accuracy",
    "worst seed",
    "against sync_sgd",
    "staleness, mean",
    "p99",
    "samples/s",
    "idle",
]


def data_of(job: str) -> Path | None:
    """The folder of the job's data; None: they come with it."""
    if not job.startswith("mnist"):
        return None
    shared = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("POLYTEMPO_DATA", shared)) / "mnist"


def measured(job: str, strategy: Strategy, workers: int, seeds: int, epochs: float | None) -> list[Result]:
    """A run for each seed."""
    options: dict[str, Any] = {"workers": workers, "epochs": epochs, "data": data_of(job)}
    return [pt.run(find(job), strategy, seed=seed, **options) for seed in range(seeds)]


def accuracy_of(runs: Sequence[Result]) -> float:
    """The median."""
    return statistics.median(run.accuracy or 0.0 for run in runs)


def row(runs: Sequence[Result], reference: float) -> Sequence[str]:
    """A strategy's cells."""
    accuracy = accuracy_of(runs)
    stale = [run.server["staleness"] for run in runs if run.server is not None]
    means, tails = [s["mean"] for s in stale], [s["p99"] for s in stale]
    return [
        runs[0].strategy,
        f"{accuracy:.2%}",
        f"{min(run.accuracy or 0.0 for run in runs):.2%}",
        f"{100 * (accuracy - reference):+.2f} points",
        f"{statistics.median(means):.2f}" if means else "",
        f"{statistics.median(tails):.0f}" if tails else "",
        f"{statistics.median(run.samples_per_s for run in runs):,.0f}",
        f"{statistics.median(run.communication_share for run in runs):.0%}",
    ]


def main() -> None:
    """Measure and print a table for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["digits", "mnist"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="instead of the job's own")
    given = parser.parse_args()
    for job in given.jobs:
        rows: list[Sequence[str]] = []
        reference: float | None = None
        for strategy in STRATEGIES:
            runs = measured(job, strategy, given.workers, given.seeds, given.epochs)
            reference = accuracy_of(runs) if reference is None else reference
            rows.append(row(runs, reference))
            print(f"{job}: {' | '.join(rows[-1])}", flush=True)
        settings = find(job)
        print(f"\n{job}: {runs[0].samples:,} samples, lr {settings.lr}, batches of {settings.batch_size}\n")
        print(markdown((COLUMNS, rows)), flush=True)


if __name__ == "__main__":
    main()
