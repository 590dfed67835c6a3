"""Kill, stop and orphan the processes of a run with a parameter server, many times: how soon does training go on?

    python benchmarks/parameter_server/faults.py [--points 20] [--seed 1]

Four workers and two shards of two copies each. Every worker, head and tail is killed at as many random points of runs;
one fault follows another when the run has recovered. Heads and workers are stopped, too, a few times, and launchers
killed. Every run must end with each ticket used exactly once by each shard, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import time
from collections.abc import Sequence
from itertools import product

import torch
from harm import SHARDS, WORKERS, Fault, Recovery, Story, Watching, counting, orphaned, told

from polytempo.bench.tables import markdown

TICKETS, LAST_POINT = 800, 700
LIMIT_S = 5.0
"""The limit for 95 % of recoveries."""
WORKER_LOST_S = 2.0
"""Instead of half a minute, so that stopped workers are given up within the experiment."""

VICTIMS = [("worker", w) for w in range(WORKERS)] + [(copy, s) for copy in ("head", "tail") for s in range(SHARDS)]
HEADERS = ["fault", "times", "goes on after: median s", "95 %", "most", "whole again after: median s", "most"]


def main() -> None:
    """Print the table; exit with 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20, help="kills of each process")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.points)
    stories = [once_each(seed, VICTIMS, signal.SIGKILL) for seed in seeds]
    few = seeds[: -(-options.points // 4)]
    stories += [once_each(seed, [("worker", seed % WORKERS), ("head", seed % SHARDS)], signal.SIGSTOP) for seed in few]
    wrong = [line for story in stories for line in story.wrong]
    recoveries = [recovery for story in stories for recovery in story.launcher.recoveries]
    rows: list[Sequence[str]] = []
    for number, what in product((signal.SIGKILL, signal.SIGSTOP), ("worker", "head", "tail")):
        row, faults = row_of(f"{number.name} {what}", [r for r in recoveries if r.fault[1::2] == (what, number)])
        rows += row
        wrong += faults
    print(markdown((HEADERS, rows)))
    orphans = [orphaned(signal.SIGKILL, random.Random(seed).randrange(TICKETS // 2), TICKETS) for seed in seeds]
    wrong += [line for _, left in orphans for line in left]
    most_s = max(seconds for seconds, _ in orphans)
    print(f"\n{len(orphans)} launchers killed: all of the run is gone after at most {most_s:.2f} s")
    print(
        f"{len(stories)} runs with faults; "
        + ("\n".join(["wrong:", *wrong]) if wrong else "nothing lost, nothing twice, nothing left")
    )
    raise SystemExit(bool(wrong))


def once_each(seed: int, victims: Sequence[tuple[str, int]], number: signal.Signals) -> Story:
    """A run with one signal for each of the victims, in random order at random points."""
    plan = random.Random(seed)
    order = plan.sample(victims, len(victims))
    points = sorted(plan.randrange(LAST_POINT) for _ in order)
    faults = [Fault(point, what, which, number) for point, (what, which) in zip(points, order, strict=True)]
    timing = {"worker_lost_s": WORKER_LOST_S} if number == signal.SIGSTOP else {}
    since_s = time.monotonic()
    story = told(lambda run, supervisor: Watching(run, supervisor, faults, seed), counting(TICKETS), timing=timing)
    done = f"{len(story.launcher.recoveries)} of {len(faults)} x {number.name} in {time.monotonic() - since_s:.1f} s"
    print(f"seed {seed}: {done}", *story.wrong, sep="\n    ", flush=True)
    return story


def row_of(what: str, recoveries: Sequence[Recovery]) -> tuple[list[Sequence[str]], list[str]]:
    """The table's row, if there is one, and its faults."""
    needed = sorted(r.needed_s for r in recoveries if r.needed_s is not None)
    whole = sorted(r.whole_s for r in recoveries if r.whole_s is not None)
    if not needed or not whole:
        return [], []
    late = quantile(needed, 0.95)
    figures = [quantile(needed, 0.5), late, needed[-1], quantile(whole, 0.5), whole[-1]]
    wrong = [f"{what}: 95 % take up to {late:.2f} s"] if late > LIMIT_S else []
    return [[what, str(len(recoveries)), *(f"{seconds:.3f}" for seconds in figures)]], wrong


def quantile(values: Sequence[float], part: float) -> float:
    """The least of the sorted values that at least `part` of them do not exceed."""
    return values[max(0, math.ceil(part * len(values)) - 1)]


if __name__ == "__main__":
    main()
