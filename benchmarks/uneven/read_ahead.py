"""Milliseconds a step of jobs on a stream without a length: rows asked for a step ahead, and when they are needed.

    python benchmarks/uneven/read_ahead.py [--turns 10] [--steps 150]

Two workers, each with a shard of the stream. A batch takes 10 ms to make, each alike, or drawn from an exponential
distribution with that mean. Both ways take turns in one run.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import polytempo as pt
from polytempo.training.model.stream_meeting import StreamMeeting

BATCH_S, BATCH_SIZE, INPUTS = 0.01, 8, 256
NOT_AHEAD, VARYING = "POLYTEMPO_NOT_AHEAD", "POLYTEMPO_VARYING"
"""The workers are other processes: the environment tells them."""


class Slow(IterableDataset[tuple[Tensor, Tensor]]):
    """A shard with batches that take time to make."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        drawn, x, number = random.Random(self.index), torch.randn(INPUTS), 0
        while True:
            if number % BATCH_SIZE == 0:
                time.sleep(drawn.expovariate(1 / BATCH_S) if os.environ.get(VARYING) else BATCH_S)
            number += 1
            yield x, torch.tensor(number % 10)


class Shards(Slow):
    """The stream."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Slow:
        """One worker's part."""
        return Slow(index)


def model() -> nn.Module:
    """A step of some milliseconds."""
    return nn.Sequential(nn.Linear(INPUTS, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


job = pt.Job(
    model=model,
    data=lambda path: pt.Data(Shards(0), None),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    lr=0.01,
    batch_size=BATCH_SIZE,
)

_ask = StreamMeeting.ask


async def _ask_ahead(self: StreamMeeting, step: int) -> None:
    if not os.environ.get(NOT_AHEAD):
        await _ask(self, step)


async def _hear_now(self: StreamMeeting, step: int) -> None:
    await _ask(self, step)
    if self._pieces is not None and self._coming is not None:
        coming, self._coming = self._coming, None
        self._pieces.hear((await coming).reshape(-1, 3).tolist())


StreamMeeting.ask, StreamMeeting.hear = _ask_ahead, _hear_now  # type: ignore[method-assign]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=150)
    asked = parser.parse_args()
    print(
        "| a batch | strategy | ahead, ms a step | not ahead | ratio | median of paired ratios |\n" + "|---" * 6 + "|"
    )
    for varying, strategy in (("", "sync_sgd"), ("1", "sync_sgd"), ("1", "local_sgd(period=8)")):
        os.environ[VARYING] = varying
        found: dict[str, list[float]] = {"": [], "1": []}
        for turn in range(asked.turns):
            for way in ("", "1") if turn % 2 else ("1", ""):
                os.environ[NOT_AHEAD] = way
                result = pt.run(job, strategy, 2, steps=asked.steps, threads=1)
                found[way].append(1e3 * result.seconds / asked.steps)
        ahead, now = median(found[""]), median(found["1"])
        paired = median(late / early for early, late in zip(found[""], found["1"], strict=True))
        kind = "drawn, 10 ms in the mean" if varying else "10 ms"
        print(f"| {kind} | `{strategy}` | {ahead:.1f} | {now:.1f} | {now / ahead:.2f} | {paired:.2f} |", flush=True)


if __name__ == "__main__":
    main()
