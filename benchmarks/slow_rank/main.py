"""Slow ranks on real processes: false alarms in quiet windows, and steps until one of four is named that slows down.

`python benchmarks/slow_rank/main.py`. A step is 50 ms of a pretended device (a sleep) behind a small model, so four
ranks fit on two cores; `--compute` takes products of matrices instead, for machines with a core for each rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.diagnosis.pace import PaceWindow
from polytempo.diagnosis.slow_rank import SlowRank, SlowRankJudge
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo

RANKS, STEP_S, SLOWER = 4, 0.050, 1.3
SLOW_FROM, STEPS_SLOW = 40, 80
PROMISED = 20
"""Steps until the slow rank is named."""


class Work(nn.Module):
    """A small layer behind so many seconds of work."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.layer, self.seconds, self._computes = nn.Linear(16, 4), STEP_S, computes
        self._matrix = torch.randn(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        if not self._computes:
            time.sleep(self.seconds)
        end_s = time.thread_time() + self.seconds
        while self._computes and time.thread_time() < end_s:
            self._matrix @ self._matrix
        answer: Tensor = self.layer(x)
        return answer


class StopAt(pt.callbacks.Callback):
    """Asks for the end once `over(step)`."""

    def __init__(self, over: Callable[[int], bool]) -> None:
        self._over = over

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control:
        return pt.callbacks.Control(stop=self._over(facts.step))


def trained(computes: bool, over: Callable[[int], bool], slow: int | None, rank: int) -> tuple[int | None, list[str]]:
    """Train until `over(step)`. Rank `slow` slows down after `SLOW_FROM` steps; the step of its diagnosis, and all."""
    torch.manual_seed(0)
    model = Work(computes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = pt.attach(model, optimizer, pt.strategies.sync_sgd(), callbacks=[StopAt(over)])
    x = torch.randn(4096, 16)
    batches = pt.shard(TensorDataset(x, x[:, :4]), batch_size=8)
    named = None
    while not handle.stopped:
        for inputs, targets in batches:
            model.seconds = STEP_S * (SLOWER if rank == slow and handle.step >= SLOW_FROM else 1.0)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if named is None and any(each["rank"] == slow for each in handle.diagnoses):
                named = handle.step
    handle.detach()
    return named, [each["text"] for each in handle.diagnoses]


def measured(windows: int, repeats: int, computes: bool, _: RankInfo) -> list[str]:
    """The lines of the table, on rank 0."""
    rank = pt.init(quiet=True).rank
    seen = [0]
    take = SlowRankJudge.take

    def counted(self: SlowRankJudge, window: PaceWindow) -> list[SlowRank]:
        seen[0] += 1
        return take(self, window)

    with patch.object(SlowRankJudge, "take", counted):
        began_s = time.monotonic()
        _, alarms = trained(computes, lambda step: seen[0] >= windows, None, rank)
    lines = [f"quiet: {len(alarms)} alarms in {seen[0]:,} windows, {time.monotonic() - began_s:.0f} s", *alarms]
    after = list[int | None]()
    for repeat in range(repeats):
        named, texts = trained(computes, lambda step: step >= SLOW_FROM + STEPS_SLOW, repeat % RANKS, rank)
        after.append(None if named is None else named - SLOW_FROM)
        lines.append(f"rank {repeat % RANKS} slows down: named after {after[-1]} steps; {'; '.join(texts)}")
    kept = sum(each is not None and 0 < each <= PROMISED for each in after)
    return [*lines, f"named within {PROMISED} steps: {kept} of {repeats}"]


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=1000, help="quiet windows")
    parser.add_argument("--repeats", type=int, default=12, help="runs with a rank that slows down")
    parser.add_argument("--compute", action="store_true", help="work is computed; it needs a core for each rank")
    given = parser.parse_args()
    print(f"{RANKS} ranks on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(*launch(partial(measured, given.windows, given.repeats, given.compute), RANKS, threads=1)[0], sep="\n")


if __name__ == "__main__":
    main()
