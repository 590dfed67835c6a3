"""The number of worker processes that this machine can hold, decided before the first one is started.

refused: more processes or open files than the system allows, more memory than is free    said: far more than cores
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import nn

from polytempo.core.system import descriptors
from polytempo.data.plan import check_enough
from polytempo.spec.job import Data

LEAST_BYTES = 8 << 20
"""No worker has less memory for itself: Python's and torch's pages that it writes to after the fork."""
_SPARE_FILES = 64
"""Open files of a worker beside two for each other worker."""
_WORKERS_PER_CORE = 4
"""More of them only wait for each other, and that is said."""
_COPIES = 2
"""A virtual worker has weights, gradients and its optimizer's state."""
_LEAST_MODEL_BYTES = 20_000
"""Python's objects around a model of one layer."""
_CGROUP, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_INSTEAD = "or simulate that many: pt.simulate, `polytempo simulate`"


class ProcessLimits(NamedTuple):
    """The resources that this machine has left for a run. None: it does not say, or there is no limit."""

    processes: int | None
    files: int | None
    """Open files of one process."""
    memory_bytes: int | None
    cores: int


def limits() -> ProcessLimits:
    """The least of the limits of this machine, this user and its control groups."""
    memory = [*_memory_groups(), *_available()]
    processes = [left for group in _groups("pids") for left in _left(group, "pids.max", "pids.current")]
    processes += _kernel()
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        processes.append(soft)
    files = descriptors.raised()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    no_limit = files == resource.RLIM_INFINITY
    return ProcessLimits(min(processes, default=None), None if no_limit else files, min(memory, default=None), cores)


def check_processes(processes: int, workers: int, found: ProcessLimits | None = None) -> None:
    """Raise ValueError if the system allows fewer than so many `processes`, with `workers` workers among them."""
    found = found or limits()
    if found.processes is not None and processes + 2 > found.processes:  # the launcher's janitor, too
        raise ValueError(
            f"workers={workers} needs {processes:,} processes, and this machine allows {found.processes:,} more; "
            f"use at most {_fewer(workers, processes, found.processes - 2):,} workers, {_INSTEAD}"
        )
    if found.files is not None and 2 * processes + _SPARE_FILES > found.files:
        most = (found.files - _SPARE_FILES) // 2
        raise ValueError(
            f"workers={workers} needs {2 * processes + _SPARE_FILES:,} open files in each process, and the limit is "
            f"{found.files:,}; raise it (ulimit -n), use at most {_fewer(workers, processes, most):,} workers, "
            f"{_INSTEAD}"
        )
    check_memory(LEAST_BYTES, workers, found)


def check_memory(each_bytes: int, workers: int, found: ProcessLimits | None = None) -> None:
    """Raise ValueError where `workers` of `each_bytes` do not fit into the memory that is free."""
    free = (found or limits()).memory_bytes
    each = max(each_bytes, LEAST_BYTES)
    if free is not None and workers * each > free:
        raise ValueError(
            f"workers={workers} needs at least {workers * each / 1e9:,.1f} GB of memory ({each / 1e6:,.0f} MB each), "
            f"and {free / 1e9:,.1f} GB are free; use at most {max(1, free // each):,} workers, {_INSTEAD}"
        )


def check_simulated(
    model: nn.Module, data: Data, workers: int, found: ProcessLimits | None = None, *, models: int | None = None
) -> None:
    """Raise ValueError where there are more virtual workers than samples, or than models fit into the memory.

    `models`: how many there are, where workers do not have one each.
    """
    if hasattr(data.train, "__len__"):
        check_enough(len(data.train), workers)
    each = _COPIES * sum(parameter.nbytes for parameter in model.parameters()) + _LEAST_MODEL_BYTES
    free = (found or limits()).memory_bytes
    models = models or workers
    if free is not None and models * each > free:
        have, fewer = "a model each", f"at most {max(1, free // each):,} workers, "
        if models < workers:  # each stands for many, so fewer workers have as many
            have, fewer = f"{models} {'model' if models == 1 else 'models'} between them", ""
        raise ValueError(
            f"{workers:,} virtual workers have {have}, {each / 1e6:,.3g} MB with its gradient, and "
            f"{free / 1e9:,.1f} GB are free; use {fewer}a smaller model, or meta (only the time)"
        )


def cores_notes(workers: int, found: ProcessLimits | None = None) -> list[str]:
    """Notes for many more workers than cores."""
    cores = (found or limits()).cores
    if workers <= _WORKERS_PER_CORE * cores:
        return []
    which = "one core" if cores == 1 else f"{cores} cores"
    return [
        f"{workers} workers share {which}, so each step takes them one after the other; {_INSTEAD.partition(' ')[2]}"
    ]


def batch_notes(samples: int | None, workers: int, batch_size: int) -> list[str]:
    """Notes for a step that asks for more samples than there are."""
    if samples is None or workers * batch_size <= samples:
        return []
    who, asked = "1 worker" if workers == 1 else f"{workers} workers", workers * batch_size
    return [
        f"a step of {who} with batch size {batch_size} asks for {asked:,} samples, and there are {samples:,}: every "
        f"step takes all of them, about {max(1, samples // workers):,} a worker"
    ]


def _fewer(workers: int, processes: int, most: int) -> int:
    """So many workers, if others than workers stay as they are."""
    return max(1, most - (processes - workers))


def _groups(controller: str) -> Iterator[Path]:
    """The control groups of this process and all around them, of version 2, and of version 1 with this controller."""
    lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines() if _OWN_GROUPS.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            top = _CGROUP / controller if controllers else _CGROUP
            own = top / path.strip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _memory_groups() -> Iterator[int]:
    for group in _groups("memory"):
        yield from _left(group, "memory.max", "memory.current")
        yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left(group: Path, most: str, used: str) -> Iterator[int]:
    """The rest of one group's limit; memory that holds copies of files counts as free."""
    try:
        limit = (group / most).read_text(encoding="ascii").strip()
        if limit == "max":
            return
        taken = int((group / used).read_text(encoding="ascii"))
        if most.startswith("memory"):
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            of_all = "total_" if most == "memory.limit_in_bytes" else ""  # version 1: of this group's children, too
            kinds = (f"{of_all}inactive_file ", f"{of_all}active_file ")
            taken -= sum(int(line.split()[1]) for line in lines if line.startswith(kinds))
    except (OSError, ValueError):
        return
    yield max(0, int(limit) - taken)


def _available() -> Iterator[int]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    yield from (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _kernel() -> Iterator[int]:
    for name in ("pid_max", "threads-max"):
        try:
            yield int((Path("/proc/sys/kernel") / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
