"""The cost of comparing hashes of the ranks' models: the share of a step, and steps with and without.

Both contenders run in the same processes, in turns of a few steps each. `share` is the processor's time
spent inside the watch over the time of its steps, which says more on a busy machine than the difference of two medians:
the watch waits for nothing that the next exchange would not wait for.

    python benchmarks/drift/main.py [--turns 30] [--workers 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from polytempo.bench.models import BenchTransformer, cnn
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.training.hooks.drift import comparable
from polytempo.training.hooks.drift_watch import DriftWatch

Batch = tuple[Tensor, Tensor]


def mlp(*sizes: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def vectors(batch_size: int, *shape: int) -> Callable[[], Batch]:
    """Random inputs and classes 0 to 9."""
    return lambda: (torch.randn(batch_size, *shape), torch.randint(10, (batch_size,)))


def symbols() -> Batch:
    """Random symbols and their successors."""
    return torch.randint(64, (8, 64)), torch.randint(64, (8, 64))


WORKLOADS: list[tuple[str, Callable[[], nn.Module], Callable[[], Batch], int, int]] = [
    ("digits MLP 64-128-10, batch 256", lambda: mlp(64, 128, 10), vectors(256, 64), 100, 1500),
    ("MLP 784-2048-2048-10, batch 64", lambda: mlp(784, 2048, 2048, 10), vectors(64, 784), 4, 40),
    ("CNN, batch 64", cnn, vectors(64, 1, 28, 28), 10, 100),
    ("transformer, 4 layers of 256, batch 8 x 64", BenchTransformer, symbols, 4, 24),
]
"""Name, model, batch, steps a turn, and steps before the first turn: the watch finds its pace there."""


class Timed:
    """A watch, and the processor's time spent in it."""

    def __init__(self, watch: DriftWatch) -> None:
        self.watch, self.seconds = watch, 0.0

    def _timed(self, call: Callable[[], None]) -> None:
        begin_s = time.thread_time()
        call()
        self.seconds += time.thread_time() - begin_s

    def after_exchange(self) -> None:
        """Timed."""
        self._timed(self.watch.after_exchange)

    def after_step(self) -> None:
        """Timed."""
        self._timed(self.watch.after_step)

    def check(self, *, buffers: bool) -> None:
        """Not timed: it belongs to a checkpoint."""
        self.watch.check(buffers=buffers)

    def end(self) -> None:
        """Not timed."""
        self.watch.end()


def attached(make: Callable[[], nn.Module], on_drift: Any) -> tuple[Callable[[Batch], None], pt.training.Handle]:
    """A plain loop's step with Adam, and its handle."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    handle = pt.attach(model, optimizer, on_drift=on_drift)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step, handle


def measured(workload: int, num_turns: int) -> dict[str, Any]:
    """One rank's figures."""
    _, make, make_batch, steps_a_turn, warm_up = WORKLOADS[workload]
    torch.manual_seed(0)
    (ours, handle), (plain, _) = attached(make, "stop"), attached(make, "ignore")
    batch = make_batch()
    watch = handle.replica.drift
    assert isinstance(watch, DriftWatch)
    timed = handle.replica.drift = Timed(watch)
    for _ in range(warm_up):
        ours(batch)
    timed.seconds = 0.0
    contenders = {"ours": ours, "plain": plain}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(num_turns):
        for name in ("ours", "plain") if turn % 2 else ("plain", "ours"):
            dist.barrier()
            begin_s = time.perf_counter()
            for _ in range(steps_a_turn):
                contenders[name](batch)
            seconds[name].append((time.perf_counter() - begin_s) / steps_a_turn)
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    state_bytes = sum(t.nbytes for t in comparable(handle.replica, watch._what).values())
    share = timed.seconds / (sum(seconds["ours"]) * steps_a_turn)
    return medians | {
        "state_MB": state_bytes / 1e6,
        "share": share,
        "every": watch._every,
        "looks": watch._walk.num_slices,
        "steps_to_see_all": watch._every * watch._walk.num_slices,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for number, (name, *_) in enumerate(WORKLOADS):

        def work(rank_info: RankInfo, number: int = number) -> dict[str, Any]:
            init(quiet=True)
            return measured(number, arguments.turns)

        row = launch(work, arguments.workers, threads=1)[0]
        rows.append({"workload": name, "workers": arguments.workers, **row})
        print(
            f"| {name} | {row['state_MB']:.1f} | {row['ours']:.2f} | {row['plain']:.2f} | {row['share']:.2%} | "
            f"0.50 % | {row['every']} | {row['steps_to_see_all']} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
