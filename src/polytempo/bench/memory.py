"""`bench memory`: the peak memory of all workers together while they train one model with Adam.

A page that several processes share counts as a part for each (proportional set size), so the sum over the workers is
the memory that the machine needs. A thread in each worker looks every few milliseconds, since a peak may be short; sums
are of the workers' last looks, so they are of one moment to within a look.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polytempo import strategies
from polytempo.bench.machine import memory_bytes, written
from polytempo.bench.rank import BenchRank, crewed
from polytempo.native.library import why_not
from polytempo.training.hooks.attach import attach_replica

CONFIGURATIONS = ("ddp_gloo", "shared_memory")
_ROLLUP = Path("/proc/self/smaps_rollup")
_MAX_WIDTH = 2048
_LOOK_S = 0.02
_MAX_WORKERS = 64
_COPIES = 6
"""Parameters, gradients, buckets, Adam's two, and a batch of temporaries."""

Look = tuple[float, int]
"""Time, by the clock that all processes share, and bytes."""


class MemoryPlan(NamedTuple):
    """The plan of the benchmark."""

    workers: int
    parameters: int
    steps: int


def memory(plan: MemoryPlan) -> dict[str, Any]:
    """Measure; the result as `written` lays it out.

    A row: configuration, workers, parameters (as many as the model really has), peak_bytes over all workers,
    before_bytes (the same before there was a model: Python and torch), and the ratio of peaks to ddp_gloo's.
    Errors: ValueError where the machine cannot measure it or has too little memory.
    """
    _check(plan)
    reason = why_not()
    missing = {"shared_memory": reason} if reason else {}
    rows: list[dict[str, Any]] = []
    for name in CONFIGURATIONS:
        if name not in missing:
            before, peak = _measured(plan, name)
            row: dict[str, Any] = {
                "configuration": name,
                "workers": plan.workers,
                "parameters": _count(plan.parameters),
            }
            row |= {"peak_bytes": peak, "before_bytes": before}
            rows.append({**row, "ratio": peak / (rows[0]["peak_bytes"] if rows else peak)})
    return written("memory", plan._asdict(), missing, rows)


def made(parameters: int) -> nn.Module:
    """Square linear layers with about so many parameters together."""
    width, layers = _shape(parameters)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def together(by_rank: Sequence[Sequence[Look]]) -> int:
    """The largest sum of the workers' last looks, at any moment after all had looked."""
    looks = sorted((when, rank, num_bytes) for rank, seen in enumerate(by_rank) for when, num_bytes in seen)
    last: dict[int, int] = {}
    peak = 0
    for _, rank, num_bytes in looks:
        last[rank] = num_bytes
        if len(last) == len(by_rank):
            peak = max(peak, sum(last.values()))
    return peak


def _measured(plan: MemoryPlan, name: str) -> tuple[int, int]:
    """Bytes of all workers before there is a model, and at the peak."""

    def work(crew: BenchRank) -> list[list[Look]]:
        crew.say(f"{plan.workers} workers: {name}, {_count(plan.parameters):,} parameters")
        crew.barrier()
        before, looks = [_look()], list[Look]()
        crew.barrier()
        with _watched(looks):
            _train(crew, name, plan, looks)
        crew.barrier()  # no rank leaves, and hands its shared pages on to the others, while they still look
        return [before, looks]

    before, during = zip(*crewed(work, plan.workers), strict=True)
    return together(before), together(during)


def _train(crew: BenchRank, name: str, plan: MemoryPlan, looks: list[Look]) -> None:
    torch.manual_seed(0)
    model = made(plan.parameters)
    batch = torch.randn(1, _shape(plan.parameters)[0])
    if name == "ddp_gloo":
        model = DistributedDataParallel(model, process_group=crew.gloo)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if name == "shared_memory":
        attach_replica(model, optimizer, strategies.shared_memory())
    for _ in range(plan.steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        looks.append(_look())
        optimizer.step()
        looks.append(_look())


@contextmanager
def _watched(looks: list[Look]) -> Iterator[None]:
    """Look from a thread, too."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            looks.append(_look())

    thread = threading.Thread(target=watch, name="polytempo-memory")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _look() -> Look:
    """This process's proportional set size, now."""
    line = next(line for line in _ROLLUP.read_text(encoding="ascii").splitlines() if line.startswith("Pss:"))
    return time.monotonic(), int(line.split()[1]) << 10


def _shape(parameters: int) -> tuple[int, int]:
    """Width and number of layers: at least two layers, so that one is exchanged while the next is computed."""
    width = min(_MAX_WIDTH, math.isqrt(parameters // 2))
    return width, round(parameters / width**2)


def _count(parameters: int) -> int:
    width, layers = _shape(parameters)
    return layers * width**2


def _check(plan: MemoryPlan) -> None:
    if not _ROLLUP.is_file():
        raise ValueError("proportional set sizes need /proc/self/smaps_rollup, and this system does not have it")
    if not 2 <= plan.workers <= _MAX_WORKERS:
        raise ValueError(f"--workers {plan.workers}: from 2 to {_MAX_WORKERS}")
    if plan.parameters < 2 or plan.steps < 1:
        raise ValueError(f"--parameters {plan.parameters}, --steps {plan.steps}: at least 2 parameters and 1 step")
    needed, free = 4 * _COPIES * plan.parameters * plan.workers, memory_bytes("MemAvailable")
    if free is not None and needed > free:
        raise ValueError(
            f"--parameters {plan.parameters}: DDP needs about {needed / 1e9:.1f} GB on {plan.workers} workers, and "
            f"{free / 1e9:.1f} GB are free; ask for fewer parameters or workers"
        )
