"""The cost of each codec in accuracy: real processes, against uncompressed synchronous SGD on as many samples.

    python benchmarks/compression/accuracy.py [--jobs digits mnist] [--workers 4] [--seeds 3] [--epochs N]
        [--only dgc threshold …]

All have the job's own learning rate, batches, epochs and schedule, and its optimizer, SGD with momentum; `dgc`, which
keeps the momentum itself, has SGD without. The rows are medians over the seeds. MNIST is looked for where
`POLYTEMPO_DATA` says, or in `shared/data` beside the repository.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.core import Strategy
from polytempo.jobs import find
from polytempo.spec.result import Result

s, c = pt.strategies, pt.compression
STRATEGIES = [
    s.sync_sgd(),
    s.bf16_sgd(),
    s.int8_sgd(),
    s.int8_sgd(dynamic=True),
    s.one_bit_sgd(),
    s.top_k_sgd(0.01),
    s.top_k_sgd(0.01, feedback=False),
    s.threshold_sgd(0.02, density=None),
    s.threshold_sgd(0.05, density=None),
    s.threshold_sgd(0.05, density=0.01),
    s.dgc(0.01),
    s.dgc(0.001, warmup_steps=100),
    s.qsgd(),
    s.terngrad(),
    s.power_sgd(2),
    s.sign_sgd(feedback=True),
    s.local_sgd(period=8),
    s.local_sgd(period=8, codec=c.feedback(c.one_bit())),
    s.diloco(period=16, outer_momentum=0.9),
    s.diloco(period=16, outer_momentum=0.9, codec=c.feedback(c.top_k(0.01))),
    s.diloco(period=16, outer_momentum=0.9, codec=c.feedback(c.top_k(0.1))),
]
"""The first is the base of the comparison."""
COLUMNS = ["strategy", "accuracy", "worst seed", "against sync_sgd", "bytes a step and rank", "samples/s", "idle"]


def data_of(job: str) -> Path | None:
    """The folder of the job's data; None: they come with it."""
    if not job.startswith("mnist"):
        return None
    shared = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("POLYTEMPO_DATA", shared)) / "mnist"


def measured(job: str, strategy: Strategy, workers: int, seeds: int, epochs: float | None) -> list[Result]:
    """A run for each seed."""
    options: dict[str, Any] = {"workers": workers, "epochs": epochs, "data": data_of(job)}
    own = find(job)
    if strategy.name.startswith("dgc("):
        own = replace(own, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr))
    return [pt.run(own, strategy, seed=seed, **options) for seed in range(seeds)]


def accuracy_of(runs: Sequence[Result]) -> float:
    """The median."""
    return statistics.median(run.accuracy or 0.0 for run in runs)


def row(runs: Sequence[Result], reference: float) -> Sequence[str]:
    """A strategy's cells."""
    accuracy = accuracy_of(runs)
    return [
        f"`{runs[0].strategy}`",
        f"{accuracy:.2%}",
        f"{min(run.accuracy or 0.0 for run in runs):.2%}",
        f"{100 * (accuracy - reference):+.2f} points",
        f"{statistics.median(run.bytes_sent_per_rank / run.steps for run in runs):,.0f}",
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
    parser.add_argument("--only", nargs="+", default=[""], help="how the names of strategies begin")
    given = parser.parse_args()
    others = [strategy for strategy in STRATEGIES[1:] if strategy.name.startswith(tuple(given.only))]
    for job in given.jobs:
        rows: list[Sequence[str]] = []
        reference: float | None = None
        for strategy in [STRATEGIES[0], *others]:
            runs = measured(job, strategy, given.workers, given.seeds, given.epochs)
            reference = accuracy_of(runs) if reference is None else reference
            rows.append(row(runs, reference))
            print(f"{job}: {' | '.join(rows[-1])}", flush=True)
        settings = find(job)
        print(f"\n{job}: {runs[0].samples:,} samples, lr {settings.lr}, batches of {settings.batch_size}\n")
        print(markdown((COLUMNS, rows)), flush=True)


if __name__ == "__main__":
    main()
