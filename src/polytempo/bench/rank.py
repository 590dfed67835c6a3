"""The workers of a benchmark: real processes that have met, with a gloo group to keep in step by."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from polytempo.engines.engine import Result
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.interop.autoload import register
from polytempo.native.library import why_not

WAIT_S = 120.0
"""The longest that a worker waits for another; the slowest call that is measured takes about a second."""
RUN_S = 4 * 3600.0
LOADED = (torch._dynamo,)
"""Optimizers load it when they are made: once here, before workers are forked, instead of once in each."""


class BenchRank:
    """One worker's view: its rank, both transports (`ours` is None without the native core), how to keep in step."""

    def __init__(self, rank_info: RankInfo, say: Callable[[str], None]) -> None:
        register()
        init(timeout_s=WAIT_S, device="cpu", quiet=True)
        self.rank, self.size = rank_info.rank, rank_info.size
        self.gloo = _group("gloo")
        self.ours = None if why_not() else _group("polytempo")
        self._say = say

    def barrier(self) -> None:
        """Wait for all, asleep in gloo's sockets."""
        dist.barrier(group=self.gloo)

    def agree(self, number: int) -> int:
        """Rank 0's number."""
        said = torch.tensor([number])
        dist.broadcast(said, 0, group=self.gloo)
        return int(said.item())

    def say(self, line: str) -> None:
        """A line of progress, from rank 0 alone."""
        if self.rank == 0:
            self._say(line)


def crewed(work: Callable[[BenchRank], Result], workers: int, tick: Callable[[], object] | None = None) -> list[Any]:
    """Results of `work(crew)` on each of `workers` processes of one thread. Progress goes to standard error."""
    descriptor = os.dup(2)  # a worker's own standard error is its log

    def serve(rank_info: RankInfo) -> Result:
        result = work(BenchRank(rank_info, lambda line: _write(descriptor, line)))
        dist.destroy_process_group()
        return result

    try:
        return launch(serve, workers, threads=1, timeout_s=RUN_S, tick=tick)
    finally:
        os.close(descriptor)


def _group(backend: str) -> Any:
    return dist.new_group(backend=backend, timeout=timedelta(seconds=WAIT_S))


def _write(descriptor: int, line: str) -> None:
    os.write(descriptor, f"{line}\n".encode())
