"""Real ranks in a default group of the backend "polytempo"."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result


def begin(rank_info: RankInfo, name: str = "store", timeout_s: float = 30) -> None:
    """Join the default group."""
    store = dist.FileStore(str(rank_info.rendezvous / name), rank_info.size)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("polytempo", store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=limit)


def run(num_ranks: int, work: Callable[[RankInfo], Result]) -> list[Any]:
    """The value of `work` on each rank, in a default group."""

    def joined(rank_info: RankInfo) -> Result:
        begin(rank_info)
        try:
            return work(rank_info)
        finally:
            dist.destroy_process_group()

    return launch(joined, num_ranks, threads=1, timeout_s=40)
