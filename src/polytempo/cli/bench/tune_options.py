"""The tables of `polytempo tune`, checked before torch is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from polytempo.cli.options.shared_options import OPTIONS, BatchSize, Data, GlobalBatchSize, Job, Json, Seed
from polytempo.spec.table.option import Count, Option, Positive


@dataclass(frozen=True, kw_only=True)
class TuneBatchOptions:
    """Options of `polytempo tune batch`."""

    job: Job
    workers: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Number of workers. Default: it is recommended, too."""
    extra: Annotated[Positive, Option(OPTIONS, "X")] = 0.1
    """Samples that the batch may cost beyond the cost of small ones. Default: 0.1, 10 %."""
    budget: Annotated[Positive, Option(OPTIONS, "R")] = 0.75
    """The most that the advice may cost, in runs of the job's epochs. Default: 0.75."""
    seed: Seed = 0
    data: Data = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class TuneThreadsOptions:
    """Options of `polytempo tune threads`."""

    job: Job
    cores: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Cores to divide. Default: all of this machine."""
    batch_size: BatchSize = None
    global_batch_size: GlobalBatchSize = None
    rounds: Annotated[Count, Option(OPTIONS, "R")] = 5
    """Number of rounds; every division runs in each. Default: 5."""
    turn_s: Annotated[Positive, Option(OPTIONS, "S")] = 0.5
    """Seconds that a division runs in a round. Default: 0.5."""
    data: Data = None
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse more cores than there are, and batches that they cannot share."""
        there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.cores is not None and self.cores > there:
            raise ValueError(f"--cores {self.cores}: this process may use {there}")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError("--batch-size and --global-batch-size say the same in two ways; leave one out")
        cores = self.cores or there
        if self.global_batch_size is not None and self.global_batch_size < cores:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size}: {cores} workers would not have a sample each; give "
                f"{cores} or more, or fewer --cores"
            )
        object.__setattr__(self, "cores", cores)
