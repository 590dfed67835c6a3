"""Workers of a synchronous run are killed, stopped, sent away and taken in at random moments, its janitor first.

    python benchmarks/elastic/main.py                            # 100 events on sync_sgd(route=invariant)
    python benchmarks/elastic/main.py --strategy sync_sgd        # weights equal to rounding alone
    python benchmarks/elastic/main.py --strategy "int8_sgd()" --events 40
    python benchmarks/elastic/main.py --strategy "local_sgd(period=4)" --events 25 --epochs 15
    python benchmarks/elastic/main.py --job mnist --data FOLDER --epochs 3 --batch 128

A step lasts 10 ms at least while there are events to come, so that a run is long enough for them. Recovery is the time
from the signal, or from the change of the available workers, until the others have made a step without that worker, or
with the new ones.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - optimizers need it: loaded here once, and not in each worker
from torch import Tensor

import polytempo as pt
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic
from polytempo.runs.run_collective import run_collective
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

STEP_S = 0.01
WORKERS, LEAST, MOST = 4, 1, 6
KINDS = {"SIGKILL": 6, "SIGSTOP": 1, "SIGTERM": 1, "room": 4}
"""The share of each kind of event."""


class Storm:
    """Draws events from a seed, one after the other has been recovered from, and notes how long that took."""

    def __init__(self, seed: int, events: int, over: Path) -> None:
        self._random, self._left, self._over = random.Random(seed), events, over
        self.available = WORKERS
        self.seconds: list[tuple[str, float]] = []
        self._plot: Iterator[None] | None = None

    def watch(self, launcher: ElasticLauncher) -> None:
        """Go on with the story, as often as the launcher looks for news."""
        self._plot = self._plot or self._story(launcher)
        next(self._plot, None)

    def _story(self, launcher: ElasticLauncher) -> Iterator[None]:
        self._harm_janitor(launcher)
        while self._left:
            until_s = time.monotonic() + self._random.uniform(0.05, 0.4)
            while time.monotonic() < until_s or not launcher.is_training:
                yield
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            begun_s = time.monotonic()
            yield from self._change_room(launcher) if kind == "room" else self._harm(launcher, kind)
            self.seconds.append((kind, time.monotonic() - begun_s))
            self._left -= 1
        self._over.touch()

    def _harm(self, launcher: ElasticLauncher, kind: str) -> Iterator[None]:
        assert launcher.view is not None
        while len(launcher.view.members) < 2 or not launcher.is_training:  # one alone has the state
            yield
        life = self._random.choice(launcher.view.members)
        process: Any = launcher.processes[life]
        os.kill(process.pid, getattr(signal, kind))
        while life in launcher.view.members or not launcher.is_training:
            yield

    def _harm_janitor(self, launcher: ElasticLauncher) -> None:
        """Kill it or stop it: the run goes on, and ends as without that."""
        workers: list[Any] = list(launcher.processes.values())
        (janitor,) = children() - {worker.pid for worker in workers}
        os.kill(janitor, self._random.choice((signal.SIGKILL, signal.SIGSTOP)))

    def _change_room(self, launcher: ElasticLauncher) -> Iterator[None]:
        sizes = [size for size in range(LEAST + 1, MOST + 1) if size != self.available]
        self.available = self._random.choice(sizes)
        assert launcher.view is not None
        while len(launcher.view.members) != self.available or not launcher.is_training:
            yield


def children() -> set[int]:
    """The processes that this one has started."""
    return {int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def slow(job: pt.Job, over: Path) -> pt.Job:
    """The job, with slow steps as long as `over` is not there."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad and not over.exists():
            time.sleep(STEP_S)
        return job.loss(output, target)

    return replace(job, loss=loss)


def main() -> None:
    """Run, and print the page's numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="sync_sgd(route=invariant)")
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", default="digits")
    parser.add_argument("--batch", type=int, default=96, help="samples of a step of all workers together")
    parser.add_argument("--data", type=Path, help="the folder of a job that needs one")
    given = parser.parse_args()
    job, strategy = pt.jobs.find(given.job), pt.parse_strategy(given.strategy)
    fixed = {"global_batch_size": given.batch, "seed": 3, "restarts": 10_000, "threads": 1, "data": given.data}
    options = RunOptions(epochs=given.epochs, **fixed)
    calm = run_collective(RunSpec.of(job, strategy, WORKERS, options), pt.engines.local())
    print(f"calm: {calm.steps} steps, accuracy {calm.accuracy:.4f}, weights {calm.parameters_sha256}")
    seconds: list[tuple[str, float]] = []
    runs = 0
    while len(seconds) < given.events:
        with tempfile.TemporaryDirectory() as folder:
            over = Path(folder) / "over"
            storm = Storm(given.seed + runs, given.events - len(seconds), over)
            elastic = replace(options, min_workers=LEAST, max_workers=MOST)
            spec = RunSpec.of(slow(job, over), strategy, WORKERS, elastic)
            result = run_elastic(spec, pt.engines.local(), None, lambda: storm.available, storm.watch)  # noqa: B023
        assert not children(), f"processes are left: {children()}"
        runs += 1
        seconds += storm.seconds
        assert result.ledger == calm.ledger, result.ledger  # and the account of samples has closed
        equal = "equal" if result.parameters_sha256 == calm.parameters_sha256 else "not equal"
        groups = result.membership or []
        print(
            f"run {runs}: {len(storm.seconds)} events, {len(groups)} groups, accuracy {result.accuracy:.4f}, weights "
            f"{equal} to the calm run's, each sample of {given.epochs} epochs once"
        )
    table(seconds)


def table(seconds: list[tuple[str, float]]) -> None:
    """Print how long each kind of event took to recover from."""
    for kind in [*dict.fromkeys(kind for kind, _ in seconds), "all"]:
        times = sorted(s for k, s in seconds if kind in (k, "all"))
        p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
        median = statistics.median(times)
        print(f"{kind:20} {len(times):4} median {median:.2f} s, p95 {p95:.2f} s, longest {times[-1]:.2f} s")


if __name__ == "__main__":
    main()
