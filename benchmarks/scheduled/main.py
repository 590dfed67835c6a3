"""Scheduled model parallelism: seconds of two processes, updates that weights save, and the objectives of programs.

    python benchmarks/scheduled/main.py [--data FOLDER] [--only speed,updates,topics,optimum]

`speed`: the rounds of Lasso by rows on one process and on two, in turns, one thread each. `updates`: how many updates
Lasso needs on correlated blocks, by each order, with and without the bound on correlations. `topics`: the likelihood
that LDA reaches with 1, 2 and 3 workers. `optimum`: objectives beside scikit-learn's, where it is installed, and
programs on the real data of FOLDER (default: $POLYTEMPO_DATA): housing, a9a, and scenes of Shakespeare.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.core import NotFinite
from polytempo.data import scheduled as data
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.partition.scheduled import factorization, lasso, lda, logistic, performed
from polytempo.partition.scheduled.program import added
from polytempo.runs.programs.run_schedule import ScheduledFit

VIRTUAL = pt.cluster.one_host()
SEEDS = range(5)


def speed(rows: int, columns: int, sweeps: int, turns: int) -> None:
    """Rounds of Lasso on one process and on two, after a sweep that does not count: the slowest worker's seconds."""
    samples = data.correlated(rows=rows, columns=columns, block=10, nonzeros=columns // 20)
    program = lasso(l1=0.05)

    def work(info: RankInfo) -> list[float]:
        world = init(quiet=True)

        async def rank(port: pt.core.Port) -> list[float]:
            begun = await program.begin(port, tuple(samples))
            await performed(port, begun, sweeps=1, tolerance=0)
            computed_s, begin_s = time.process_time(), time.perf_counter()
            for _ in range(sweeps * begun.rounds):
                chosen = await begun.schedule()
                await begun.pull(chosen, await added(port, await begun.push(chosen)))
            return [time.perf_counter() - begin_s, time.process_time() - computed_s]

        return world.drive(rank(world.port))

    found: dict[int, list[list[float]]] = {1: [], 2: []}
    for _ in range(turns):
        for workers, seconds in found.items():
            seconds.append([max(each) for each in zip(*launch(work, workers, threads=1), strict=True)])
    one, two = ([statistics.median(each) for each in zip(*seconds, strict=True)] for seconds in found.values())
    names = ("wall clock", "processor time of a worker")
    table = [(n, f"{a:.3f} s", f"{b:.3f} s", f"{a / b:.2f}", "2") for n, a, b in zip(names, one, two, strict=True)]
    print(f"Lasso of {rows:,} x {columns:,}, {sweeps} sweeps, medians of {turns} turns\n")
    print(markdown((("", "1 process", "2 processes", "ratio", "limit"), table)))


def updates(sweeps: int, columns: int, block: int, nonzeros: int, l1: float) -> None:
    """Lasso on columns in blocks that are correlated 0.9."""
    samples = data.correlated(rows=500, columns=columns, block=block, correlation=0.9, nonzeros=nonzeros)
    best = pt.schedule(lasso(l1=l1), samples, 1, sweeps=4 * sweeps, tolerance=1e-7, cluster=VIRTUAL).last.objective
    rows = [
        (order, str(bound), *_to_optimum(order, bound, l1, samples, best, sweeps))
        for order in ("priority", "last_change", "round_robin", "random")
        for bound in (0.1, None)
    ]
    print(f"Lasso of 500 x {columns:,}, {nonzeros} nonzeros, λ = {l1}, blocks of {block} columns correlated 0.9")
    print(f"To 1e-3 of the optimum within {sweeps} sweeps, {len(SEEDS)} seeds: median (fewest to most)\n")
    print(markdown((("order", "bound", "rounds", "updates"), rows)))


def _to_optimum(order: str, bound: float | None, l1: float, samples: Any, best: float, sweeps: int) -> tuple[str, str]:
    """Rounds and updates until the objective is within 1e-3 of the best."""
    reached = []
    for seed in SEEDS:
        program = lasso(l1=l1, order=order, bound=bound, seed=seed)
        try:
            fit = pt.schedule(program, samples, 1, sweeps=sweeps, tolerance=0, cluster=VIRTUAL)
        except NotFinite as error:
            return f"diverges: no number at round {error.step}", "-"
        reached += [each for each in fit.sweeps if each.objective - best <= 1e-3 * best][:1]
    if len(reached) < len(SEEDS):
        return f"reached by {len(reached)} of {len(SEEDS)} seeds", "-"
    return _spread([each.rounds for each in reached]), _spread([each.updates for each in reached])


def _spread(counts: list[int]) -> str:
    return f"{statistics.median(counts):,} ({min(counts):,} to {max(counts):,})"


def topics(folder: Path | None) -> None:
    """LDA with 1, 2 and 3 workers: the mean of the last fifteen sweeps."""
    found: list[tuple[str, Sequence[Any], int, int]] = [
        (f"drawn, seed {seed}", data.drawn_documents(60, 150, 30, 2, seed), 2, 40) for seed in (0, 1)
    ]
    if folder is not None:
        found.append(("scenes", data.scenes(str(folder / "tinyshakespeare/input.txt")), 20, 100))
    rows = []
    for name, documents, num_topics, sweeps in found:
        reached = []
        for workers in (1, 2, 3):
            fit = pt.schedule(lda(topics=num_topics), documents, workers, sweeps=sweeps, cluster=VIRTUAL)
            reached.append(-statistics.mean(each.objective for each in fit.sweeps[-15:]))
        apart = [f"{each:.4f} ({100 * (each / reached[0] - 1):+.2f} %)" for each in reached[1:]]
        rows.append((name, f"{len(documents[0]):,}", f"{num_topics}", f"{sweeps}", f"{reached[0]:.4f}", *apart))
    columns = ("documents", "tokens", "topics", "sweeps", "1 worker", "2 workers", "3 workers")
    print("LDA: log P(w, z) a token\n")
    print(markdown((columns, rows)))


def optimum(folder: Path | None) -> None:
    """Objectives of programs with two processes, and of scikit-learn in one."""
    drawn = data.correlated(rows=500, columns=300, block=10, correlation=0.9, nonzeros=5)
    rows = [_beside("Lasso, drawn, 500 x 300, λ = 0.2", lasso(l1=0.2), drawn, _sklearn_lasso(0.2))]
    if folder is not None:
        housing = data.table(str(folder / "california-housing/housing.csv"), "median_house_value")
        rows.append(_beside("Lasso, housing, λ = 0.05", lasso(l1=0.05), housing, _sklearn_lasso(0.05)))
        a9a = data.classes(str(folder / "a9a/a9a"))
        rows.append(_beside("logistic, a9a, λ = 0.01", logistic(l1=1e-2), a9a, _sklearn_logistic(1e-2)))
        scenes = data.word_counts(str(folder / "tinyshakespeare/input.txt"))
        rows.append(_alone("factorization, scenes, rank 10", factorization(rank=10, l2=1.0), scenes, 1e-4))
    columns = ("program and data", "objective", "error", "rounds", "seconds", "scikit-learn's", "apart", "its seconds")
    print(markdown((columns, rows)))


Reference = Callable[[Tensor, Tensor], tuple[float, float]]
"""Least objective of the data, and the seconds to find it."""


def _alone(name: str, program: Any, given: Sequence[object], tolerance: float) -> tuple[str, ...]:
    return (name, *_figures(pt.schedule(program, given, 2, sweeps=2000, tolerance=tolerance)), "-", "-", "-")


def _beside(name: str, program: Any, given: Any, reference: Reference | None) -> tuple[str, ...]:
    fit = pt.schedule(program, given, 2, sweeps=4000, tolerance=1e-7)
    if reference is None:
        return (name, *_figures(fit), "not installed", "-", "-")
    best, seconds = reference(*given)
    return (name, *_figures(fit), f"{best:.8f}", f"{(fit.last.objective - best) / best:.1e}", f"{seconds:.2f} s")


def _figures(fit: ScheduledFit) -> tuple[str, ...]:
    last = fit.last
    return (f"{last.objective:.8f}", f"{last.error:.1e}", f"{last.rounds:,}", f"{last.seconds:.2f} s")


def _sklearn_lasso(l1: float) -> Reference | None:
    linear = _sklearn()
    if linear is None:
        return None

    def reference(x: Tensor, y: Tensor) -> tuple[float, float]:
        model = linear.Lasso(alpha=l1, fit_intercept=False, tol=1e-10, max_iter=100_000)
        begin_s = time.perf_counter()
        model.fit(x.numpy(), y.numpy())
        seconds = time.perf_counter() - begin_s
        weights = torch.from_numpy(model.coef_).double()
        return float((y - x @ weights).square().mean() / 2 + l1 * weights.abs().sum()), seconds

    return reference


def _sklearn_logistic(l1: float) -> Reference | None:
    linear = _sklearn()
    if linear is None:
        return None

    def reference(x: Tensor, y: Tensor) -> tuple[float, float]:
        settings = {"C": 1 / (l1 * len(y)), "solver": "liblinear", "tol": 1e-10, "max_iter": 100_000}
        model = linear.LogisticRegression(l1_ratio=1.0, fit_intercept=False, **settings)
        begin_s = time.perf_counter()
        model.fit(x.numpy(), y.numpy())
        seconds = time.perf_counter() - begin_s
        weights = torch.from_numpy(model.coef_[0]).double()
        loss = torch.nn.functional.softplus(-y * (x @ weights)).mean()
        return float(loss + l1 * weights.abs().sum()), seconds

    return reference


def _sklearn() -> Any:
    try:
        return importlib.import_module("sklearn.linear_model")
    except ModuleNotFoundError:
        return None


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("POLYTEMPO_DATA"), help="the folder of real data")
    parser.add_argument("--only", default="speed,updates,topics,optimum")
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--columns", type=int, default=200)
    parser.add_argument("--sweeps", type=int, default=80)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = given.only.split(",")
    if "updates" in parts:
        for problem in ((1000, 20, 30, 0.1), (1000, 100, 30, 0.1), (300, 10, 5, 0.2)):
            updates(given.sweeps, *problem)
    if given.data is None:
        print("programs on real data are left out: name their folder by --data or POLYTEMPO_DATA")
    if "topics" in parts:
        topics(given.data)
    if "optimum" in parts:
        optimum(given.data)
    if "speed" in parts:
        speed(given.rows, given.columns, max(1, given.sweeps // 20), given.turns)


if __name__ == "__main__":
    main()
