"""The cost of scoring in an asynchronous run: workers' idle share and rate, with a score after each epoch and without.

    python benchmarks/parameter_server/scoring.py [--rounds 7]

Digits with a test set of 10,800 (the 360, 30 times over), two workers, one thread in each process. A round runs each
strategy with and without the test set, in turns; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from torch.utils.data import ConcatDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.jobs.digits import job as digits

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "async_sgd": pt.strategies.async_sgd,
    "downpour": lambda: pt.strategies.downpour(lr=0.02),
    "easgd": pt.strategies.easgd,
}
EPOCHS, WORKERS, TIMES = 20, 2, 30


def job(scored: bool) -> pt.Job:
    """Digits, with a large test set or none."""

    def data(given: Path | None) -> pt.Data:
        train, test = pt.data.digits()
        return pt.Data(train, ConcatDataset([test] * TIMES) if scored else None)

    return replace(digits, data=data, lr=0.02)


def measured(make: Callable[[], Strategy], scored: bool) -> tuple[float, float]:
    """The workers' mean idle share, and samples a second."""
    result = pt.run(job(scored), make(), workers=WORKERS, epochs=EPOCHS, threads=1)
    workers = result.server["workers"]
    return sum(worker["idle_share"] for worker in workers) / len(workers), result.samples_per_s


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, make in STRATEGIES.items():
            for scored in (False, True):
                found.setdefault((name, scored), []).append(measured(make, scored))
    print("| strategy | idle, not scored | idle, scored | samples/s scored, of not scored |\n| --- | --- | --- | --- |")
    for name in STRATEGIES:
        without, with_scores = found[name, False], found[name, True]
        idle = [median(share for share, _ in runs) for runs in (without, with_scores)]
        rate = median(scored / plain for (_, plain), (_, scored) in zip(without, with_scores, strict=True))
        print(f"| {name} | {idle[0]:.1%} | {idle[1]:.1%} | {rate:.2f} |")


if __name__ == "__main__":
    main()
