"""Hogwild! by atomic additions and by loads and stores: the cost of atomic ones, and the losses of the others.

    python benchmarks/one_host/additions.py [--rounds 9] [--turn-s 0.5] [--a9a shared/data/a9a/a9a]

Both ways take turns in the same worker processes. The cost is the median over rounds of the ratio of their times, with
its quartiles in parentheses. The last lines count additions to one component that all workers change at the same time.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import torch
from torch.optim import SGD, Adam, Optimizer

from polytempo.bench.models import MODELS
from polytempo.bench.rank import BenchRank, crewed
from polytempo.bench.tables import duration
from polytempo.bench.turns import Contender, Measurement, figure, ratio, slowest, timed, turns
from polytempo.data import SparseRows, libsvm_rows
from polytempo.data.rows import random_rows
from polytempo.native.kernels.sparse import scatter_add_
from polytempo.runs.programs.hogwild_linear import fit_logistic
from polytempo.strategies import hogwild
from polytempo.strategies.hogwild import Update
from polytempo.training.hooks.attach import attach_replica

UPDATES: Sequence[Update] = ("free", "atomic")
WORKERS, EPOCHS, ADDITIONS = 2, 10, 1_000_000
TRAINED: Sequence[tuple[str, str, Callable[..., Optimizer]]] = (
    ("mlp", "dense", SGD),
    ("cnn", "dense", SGD),
    ("transformer", "dense", SGD),
    ("transformer", "dense", Adam),
    ("embedding", "sparse rows", SGD),
)


def contender(model_name: str, make: Callable[..., Optimizer], update: Update, rank: int) -> Contender:
    """Steps of a model of `bench training`, attached to one copy of its weights."""
    workload = MODELS[model_name]
    torch.manual_seed(rank)
    batches = cycle([workload.batch(workload.batch_size) for _ in range(8)])
    torch.manual_seed(0)
    model = workload.make()
    optimizer = make(model.parameters(), lr=1e-4 if make is Adam else workload.lr)
    attach_replica(model, optimizer, hogwild(update))

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        optimizer.step()

    return Contender(update, timed(step))


def steps(model_name: str, make: Callable[..., Optimizer], rounds: int, turn_s: float) -> dict[str, Measurement]:
    """Seconds a step of both ways."""

    def work(crew: BenchRank) -> dict[str, list[list[float]]]:
        both = [contender(model_name, make, update, crew.rank) for update in UPDATES]
        return turns(both, crew, rounds=rounds, turn_s=turn_s)

    return slowest(crewed(work, WORKERS), "mean")


def fits(rows: SparseRows, lr: float, window: int | None, rounds: int) -> tuple[dict[str, Measurement], list[float]]:
    """Seconds a sample of both ways, and their losses in the last round."""
    seconds: dict[str, list[float]] = {update: [] for update in UPDATES}
    losses = dict.fromkeys(UPDATES, 0.0)
    for number in range(rounds):
        for update in (UPDATES, UPDATES[::-1])[number % 2]:
            fit = fit_logistic(rows, workers=WORKERS, update=update, epochs=EPOCHS, lr=lr, window=window, seed=number)
            seconds[update].append(1 / fit.samples_per_s)
            losses[update] = fit.losses[-1]
    return {update: figure(each) for update, each in seconds.items()}, list(losses.values())


def lost(update: Update) -> float:
    """The share of additions to one component that is lost while all workers add to it."""
    table = torch.frombuffer(mmap.mmap(-1, 8), dtype=torch.float64, count=1).view(1, 1)
    rows, ones = torch.zeros(ADDITIONS, dtype=torch.int64), torch.ones(ADDITIONS, 1, dtype=torch.float64)

    def work(crew: BenchRank) -> None:
        crew.barrier()
        scatter_add_(table, rows, ones, 1.0, atomic=update == "atomic")

    crewed(work, WORKERS)
    return 1 - float(table) / (WORKERS * ADDITIONS)


def row(name: str, kind: str, found: dict[str, Measurement], loss: Sequence[float] = ()) -> str:
    """A line of the table."""
    free, atomic = (found[update] for update in UPDATES)
    cost = ratio(atomic, free)
    times = " | ".join(duration(each.median * 1e6) for each in (free, atomic))
    losses = ", ".join(f"{each:.4f}" for each in loss) or "-"
    return f"| {name} | {kind} | {times} | {cost.median:.2f} ({cost.low:.2f} to {cost.high:.2f}) | {losses} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn-s", type=float, default=0.5)
    parser.add_argument("--a9a", type=Path, help="LIBSVM's file a9a; without it only drawn rows are learned from")
    given = parser.parse_args()
    print("| time of | updates | free | atomic | atomic / free | losses |\n|---|---|---|---|---|---|", flush=True)
    for model_name, kind, make in TRAINED:
        found = steps(model_name, make, given.rounds, given.turn_s)
        print(row(f"a step of {model_name}, {make.__name__}", kind, found), flush=True)
    data = [("20,000 x 10,000 at 1 %", random_rows(20_000, 10_000, density=0.01), 0.5)]
    if given.a9a is not None:
        data.append(("a9a (lr 0.01)", libsvm_rows(given.a9a), 0.01))
    for name, rows, lr in data:
        for window in (None, 1):
            found, losses = fits(rows, lr, window, given.rounds)
            shown = "chosen window" if window is None else "window 1"
            print(row(f"a sample of {name}", shown, found, losses), flush=True)
    for update in UPDATES:
        print(f"{update}: of {WORKERS} x {ADDITIONS:,} additions to one component {lost(update):.1%} are lost")


if __name__ == "__main__":
    main()
