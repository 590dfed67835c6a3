"""`dist.monitored_barrier` for groups of this backend: before 2.15 torch refuses every backend but gloo."""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from polytempo.interop.backend.named import NamedGroup


def allow_monitored_barrier() -> None:
    """Have `dist.monitored_barrier` ask groups of this backend, and torch's own function for all others."""
    torchs = dist.monitored_barrier
    if torchs.__module__ == __name__:
        return

    @wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        world: Any = dist.group.WORLD if group is None else group
        if not isinstance(world, dist.ProcessGroup) or dist.get_backend(world) != "polytempo":
            torchs(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        default = world.timeout if isinstance(world, NamedGroup) else default_pg_timeout
        ours: Any = world  # whose method has no type in torch
        ours.monitored_barrier(limit or default, wait_all_ranks)

    monitored_barrier.__module__ = __name__
    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier
