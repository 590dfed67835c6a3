"""Branches on threads beside one thread and intra-op threads; and whether `tune threads` finds the best division.

python benchmarks/threads/main.py branches [--rounds 40] [--turn-s 0.15]
python benchmarks/threads/main.py tune [--jobs recurrent wide mixed] [--rounds 3] [--true-rounds 6]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from itertools import cycle
from multiprocessing.connection import Connection

import torch
from jobs import mixed, recurrent, towers, wide, wide_towers
from torch import nn

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.bench.thread_grid import GridPlan, GridSetting, thread_grid
from polytempo.bench.turns import Contender, Measurement, figure, ratio, timed, turns
from polytempo.partition.branches import ThreadedModel

JOBS = {job.name: job for job in (recurrent, wide_towers, towers, mixed, wide)}
TUNED = ("recurrent", "wide", "mixed")
BRANCHED = (recurrent, wide_towers, towers, mixed)
CORES = 2


class Alone:
    """One process needs no one to keep in step with."""

    def barrier(self) -> None:
        """Nothing to wait for."""

    def agree(self, number: int) -> int:
        """The number."""
        return number


def loop(job: pt.Job, inter: int) -> tuple[Callable[[int], list[float]], ThreadedModel]:
    """A training loop with a model of its own: seconds of each of so many steps."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    threaded = pt.partition.threads(inter=inter).apply(model)
    images, labels = job.data(None).train.tensors  # type: ignore[attr-defined]
    batches = cycle(list(zip(images.split(job.batch_size), labels.split(job.batch_size), strict=True)))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return timed(step), threaded


def with_threads(run: Callable[[int], list[float]], threads: int) -> Callable[[int], list[float]]:
    """The same, with so many threads of each operation."""

    def turn(calls: int) -> list[float]:
        torch.set_num_threads(threads)
        return run(calls)

    return turn


class Partner:
    """A process that trains a model of its own while this one does, and sends nothing but when it is done."""

    def __init__(self, job: pt.Job) -> None:
        self._own, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(job, there), daemon=True)
        self._process.start()

    def beside(self, run: Callable[[int], list[float]]) -> Callable[[int], list[float]]:
        """Half of a step's seconds, with two at the same time: the time of a step of two free halves."""

        def turn(calls: int) -> list[float]:
            torch.set_num_threads(1)
            self._own.send(calls)
            found = run(calls)
            self._own.recv()
            return [seconds / CORES for seconds in found]

        return turn

    def end(self) -> None:
        """Let it go."""
        self._own.send(0)
        self._process.join()


def _serve(job: pt.Job, asked: Connection) -> None:
    torch.set_num_threads(1)
    run, _ = loop(job, 1)
    while calls := asked.recv():
        run(calls)
        asked.send(None)


def limit(threaded: ThreadedModel) -> float:
    """The speed-up that the counted operations allow on two threads, if regions were all there is."""
    parts = threaded.parts
    regions = () if parts is None else parts.regions
    total = sum(region.operations for region in regions)
    return total / sum(max(region.longest, region.operations / CORES) for region in regions)


def branches(rounds: int, turn_s: float) -> None:
    """Milliseconds of a step of models of two branches and of blocks of four branches."""
    rows = []
    for job in BRANCHED:
        partner = Partner(job)
        one, _ = loop(job, 1)
        branched, threaded = loop(job, CORES)
        contenders = {
            "one": with_threads(one, 1),
            "intra": with_threads(loop(job, 1)[0], CORES),
            "inter": with_threads(branched, 1),
            "apart": partner.beside(loop(job, 1)[0]),
        }
        found = turns([Contender(*each) for each in contenders.items()], Alone(), rounds=rounds, turn_s=turn_s)
        partner.end()
        seconds: dict[str, Measurement] = {name: figure([turn[0] for turn in each]) for name, each in found.items()}
        milliseconds = (f"{1e3 * seconds[name].median:.2f} ms" for name in contenders)
        to_one = (("one", "inter"), ("intra", "inter"), ("one", "apart"))
        against = (ratio(seconds[above], seconds[below]) for above, below in to_one)
        shown = (f"{each.median:.2f} ({each.low:.2f} to {each.high:.2f})" for each in against)
        rows.append((job.name, *milliseconds, *shown, f"{limit(threaded):.2f}"))
    columns = ("a step of", "one thread", "intra=2", "inter=2", "half of a step, two processes apart")
    columns = (*columns, "inter=2 to one thread", "to intra=2", "limit: processes apart", "regions allow")
    print(markdown((columns, rows)))


def tune(names: list[str], rounds: int, true_rounds: int) -> None:
    """The choice of `tune threads`, and its place in a longer measurement of the whole grid."""
    rows = []
    for name in names:
        plan = GridPlan(JOBS[name], None, CORES, None, None, rounds, 0.5)
        chosen = thread_grid(plan, say)["best"]
        true = {setting_of(row): row for row in thread_grid(plan._replace(rounds=true_rounds), say)["rows"]}
        best = max(true.values(), key=lambda row: row["samples_per_s"]["median"])
        own = true[setting_of(chosen)]["samples_per_s"]["median"]
        rates = [f"{true[each]['samples_per_s']['median']:,.0f}" for each in sorted(true)]
        below = 100 * (1 - own / best["samples_per_s"]["median"])
        rows.append((name, shown(chosen), shown(best), f"{below:.1f} %", ", ".join(rates)))
    settings = ", ".join(shown(setting._asdict()) for setting in sorted(true))
    print(markdown((("job", "chosen", "best", "below the best", f"samples/s of {settings}"), rows)))


def setting_of(row: dict[str, int]) -> GridSetting:
    """The division that a row is of."""
    return GridSetting(*(row[name] for name in GridSetting._fields))


def shown(row: dict[str, int]) -> str:
    """Workers x threads x threads of branches."""
    return " x ".join(str(row[name]) for name in GridSetting._fields)


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("branches", "tune"))
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(TUNED))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--turn-s", type=float, default=0.15)
    parser.add_argument("--true-rounds", type=int, default=6)
    given = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if given.what == "branches":
        branches(given.rounds or 40, given.turn_s)
    else:
        tune(given.jobs, given.rounds or 3, given.true_rounds)
