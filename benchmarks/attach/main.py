"""The cost of `pt.attach`: alone against the plain loop, and with 2 workers against DistributedDataParallel.

All contenders run in the same processes, in turns of a few steps each, so that a machine with a drifting speed treats
them alike. The figure is the ratio of medians over the turns.

    python benchmarks/attach/main.py [--turns 30] [--json FILE]
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
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt
from polytempo.bench.models import BenchTransformer, cnn
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo

Batch = tuple[Tensor, Tensor]


class Workload:
    """A model and the batches that it sees."""

    def __init__(self, name: str, make: Callable[[], nn.Module], batch: Callable[[], Batch], steps_a_turn: int) -> None:
        self.name, self.make, self.batch, self.steps_a_turn = name, make, batch, steps_a_turn


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


DIGITS = Workload("digits MLP 64-128-10, batch 256", lambda: mlp(64, 128, 10), vectors(256, 64), 100)
AGAINST_DDP = [
    Workload("(a) MLP 784-2048-2048-10, batch 64", lambda: mlp(784, 2048, 2048, 10), vectors(64, 784), 5),
    Workload("(b) CNN, batch 64", cnn, vectors(64, 1, 28, 28), 20),
    Workload("(c) transformer, 4 layers of 256, batch 8 x 64", BenchTransformer, symbols, 6),
]


def plain(workload: Workload) -> Callable[[Batch], None]:
    """The usual loop: the limit, since nothing is exchanged."""
    model = workload.make()
    return _loop(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def ours(workload: Workload) -> Callable[[Batch], None]:
    """The same loop with one line more."""
    model = workload.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pt.attach(model, optimizer, pt.strategies.sync_sgd())
    return _loop(model, optimizer)


def peer(workload: Workload) -> Callable[[Batch], None]:
    """The same loop around DistributedDataParallel."""
    model = DistributedDataParallel(workload.make())
    return _loop(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], None]:
    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def turns(workload: Workload, makers: dict[str, Callable[[Workload], Any]], num_turns: int) -> dict[str, list[float]]:
    """Seconds a step of each contender, one figure a turn; who begins changes from turn to turn."""
    torch.manual_seed(0)
    contenders = {name: make(workload) for name, make in makers.items()}
    batch = workload.batch()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(num_turns + 2):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            if dist.is_initialized():
                dist.barrier()  # no contender pays for the ranks' earlier drift
            begin_s = time.perf_counter()
            for _ in range(workload.steps_a_turn):
                contenders[name](batch)
            if turn >= 2:  # the first turns warm up: memory, caches, DDP's second set of buckets
                seconds[name].append((time.perf_counter() - begin_s) / workload.steps_a_turn)
    return seconds


def measured(workload: Workload, workers: int, makers: dict[str, Any], num_turns: int) -> dict[str, list[float]]:
    """Rank 0's seconds a step."""

    def work(rank_info: RankInfo) -> dict[str, list[float]]:
        init(quiet=True)
        return turns(workload, makers, num_turns)

    return launch(work, workers, threads=1)[0]  # type: ignore[no-any-return]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    cases = [(DIGITS, 1, {"ours": ours, "peer": plain})]
    cases += [(workload, 2, {"ours": ours, "peer": peer, "limit": plain}) for workload in AGAINST_DDP]
    for workload, workers, makers in cases:
        seconds = measured(workload, workers, makers, arguments.turns)
        medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
        rows.append({"workload": workload.name, "workers": workers, **medians})
        limit = f"{medians['limit']:.3f}" if "limit" in medians else "-"
        speed = medians["peer"] / medians["ours"]
        print(
            f"| {workload.name} | {workers} | {medians['ours']:.3f} | {medians['peer']:.3f} | {limit} | {speed:.3f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
