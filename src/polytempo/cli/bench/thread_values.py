"""What `polytempo tune threads` is asked for, checked before torch is imported."""

from __future__ import annotations

import os
from math import inf
from typing import NamedTuple

from polytempo import jobs

_ROUNDS, _TURN_S = 5, 0.5


class GridValues(NamedTuple):
    """The options of the command."""

    job: str
    cores: int
    batch_size: int | None
    global_batch_size: int | None
    rounds: int
    turn_s: float


def grid_values(
    job: str,
    cores: int | None,
    batch_size: int | None,
    global_batch_size: int | None,
    rounds: int | None,
    turn_s: float | None,
) -> GridValues:
    """The options with their defaults. ValueError for what cannot be measured."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    numbers = {"cores": cores, "batch-size": batch_size, "global-batch-size": global_batch_size, "rounds": rounds}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: must be at least 1")
    if cores is not None and cores > there:
        raise ValueError(f"--cores {cores}: this process may use {there}")
    if batch_size is not None and global_batch_size is not None:
        raise ValueError("--batch-size and --global-batch-size say the same in two ways; leave one out")
    if global_batch_size is not None and global_batch_size < (cores or there):
        raise ValueError(
            f"--global-batch-size {global_batch_size}: {cores or there} workers would not have a sample each; give "
            f"{cores or there} or more, or fewer --cores"
        )
    if turn_s is not None and not 0 < turn_s < inf:
        raise ValueError(f"--turn-s {turn_s:g}: must be above 0")
    jobs.check(job)
    return GridValues(job, cores or there, batch_size, global_batch_size, rounds or _ROUNDS, turn_s or _TURN_S)
