"""Batches by speed on four real workers of speeds 1, 1, 1 and 1/2.

`python benchmarks/uneven/four.py` prints milliseconds a step with equal parts and with balance="speed", in turns, and
work / Σ speed, the least that any parts allow. A sample takes a sleep, because four ranks that compute need four cores:
so all other costs of a step (dealing, hooks, the exchange, its ranks' scheduling) are there, and computing is exact.
Steps are timed from step 40 on, when parts have settled.
"""

from __future__ import annotations

import argparse
import time
from typing import Literal

import torch
from main import seconds_a_step
from torch import Tensor, nn

import polytempo as pt
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo

BATCH, FEATURES = 32, 64
SPEEDS = (1.0, 1.0, 1.0, 0.5)


class Sleeper(nn.Module):
    """A small network; a sample takes `sample_s`."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s = sample_s
        self.layers = nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(x))
        answer: Tensor = self.layers(x)
        return answer


def measured(sample_s: float, steps: int, turns: int) -> list[list[tuple[float, int]]]:
    """Results of each rank, with both ways of dealing in turns."""

    def work(_: RankInfo) -> list[tuple[float, int]]:
        own_s = sample_s / SPEEDS[pt.init(quiet=True).rank]
        torch.manual_seed(0)
        x = torch.randn(len(SPEEDS) * BATCH * steps, FEATURES)
        ways: tuple[Literal["equal", "speed"], ...] = ("equal", "speed") * turns
        return [seconds_a_step(Sleeper(own_s), x, BATCH, way) for way in ways]

    return launch(work, len(SPEEDS), threads=1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ms", type=float, default=4.0, help="milliseconds a sample takes at speed 1")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    found = measured(asked.ms / 1e3, asked.steps, asked.turns)
    least = len(SPEEDS) * BATCH * asked.ms / sum(SPEEDS)
    print(f"work / sum of speeds: {least:.1f} ms; equal parts: {BATCH * asked.ms / min(SPEEDS):.1f} ms")
    for turn, of_ranks in enumerate(zip(*found, strict=True)):
        parts = ", ".join(str(samples) for _, samples in of_ranks)
        step = 1e3 * max(seconds for seconds, _ in of_ranks)
        print(f"{('equal', 'speed')[turn % 2]}  {step:6.1f} ms a step, {step / least:.3f} x the least; parts {parts}")


if __name__ == "__main__":
    main()
