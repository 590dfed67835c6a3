"""Batches by speed on real processes: two workers. The second computes every sample twice.

`python benchmarks/uneven/main.py` prints seconds a step with equal parts and with balance="speed". Work, not sleep,
makes the second worker slow, in proportion to its samples. Steps are timed from step 40 on, when parts have settled.
"""

from __future__ import annotations

import statistics
import time
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo

STEPS, FIRST, BATCH, FEATURES = 120, 40, 96, 512


class Slower(nn.Module):
    """Layers that a slow rank computes twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.layers = nn.Sequential(nn.Linear(FEATURES, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh())
        self.last = nn.Linear(1024, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.layers(x)
        if self.twice:
            inner = (inner + self.layers(x)) / 2
        answer: Tensor = self.last(inner)
        return answer


def seconds_a_step(
    model: nn.Module, x: Tensor, batch_size: int, balance: Literal["equal", "speed"]
) -> tuple[float, int]:
    """The median over settled steps, and the samples of this rank's batch at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = pt.attach(model, optimizer, pt.strategies.sync_sgd())
    seconds, samples, begin_s = [], [], time.perf_counter()
    for batch in pt.shard(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, balance=balance):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin_s)
        samples.append(len(batch[0]))
        begin_s = time.perf_counter()
    handle.detach()
    return statistics.median(seconds[FIRST:]), samples[-1]


def work(_: RankInfo) -> list[tuple[float, int]]:
    """Measure both, twice in turns, on each of two ranks."""
    rank = pt.init(quiet=True).rank
    torch.manual_seed(0)
    x = torch.randn(2 * BATCH * STEPS, FEATURES)
    return [seconds_a_step(Slower(rank == 1), x, BATCH, balance) for balance in ("equal", "speed", "equal", "speed")]


def main() -> None:
    """Print the table."""
    equal, balanced, again, once_more = launch(work, 2, threads=1)[0]
    for first, second in ((equal, balanced), (again, once_more)):
        print(f"equal parts       {1e3 * first[0]:6.1f} ms a step, {first[1]} and {2 * BATCH - first[1]} samples")
        print(f"balance='speed'   {1e3 * second[0]:6.1f} ms a step, {second[1]} and {2 * BATCH - second[1]} samples")
        print(f"{first[0] / second[0]:.2f} times the samples per second; speeds 1 and 1/2 allow 1.50")


if __name__ == "__main__":
    main()
