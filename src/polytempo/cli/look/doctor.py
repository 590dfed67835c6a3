"""`polytempo doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, but does not tell mypy

import polytempo
from polytempo.cli.look.device_ways import between_workers
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.core import PolytempoError
from polytempo.device import accelerator_kind, num_devices
from polytempo.engines.join.environment import recognise
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.interop.autoload import register
from polytempo.native.library import available, instruction_set, why_not

_TOOLS = ("torchrun", "srun", "mpirun", "ray", "nvidia-smi")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, never written to
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Health:
    """Facts of this machine. Sizes in bytes; None if the machine does not tell."""

    polytempo: str
    python: str
    platform: str
    torch: str
    backends: dict[str, bool]
    accelerator: str | None
    """The kind of torch's accelerator. None: everything runs on the CPU."""
    devices: int
    cores: int
    threads: int
    memory: int | None
    memory_free: int | None
    shared_memory: int | None
    shared_memory_free: int | None
    native: str | None
    """The instruction set that the native core uses; None without a core, and then why not and the remedy:"""
    native_missing: str | None
    launcher: str
    tools: dict[str, bool]
    start_ms: float | None
    """Until two workers had started and found each other."""
    all_reduce_ms: float | None
    """Time for two workers to add 1 MB, the best of five."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Versions that work here but are not tested by us."""

    @property
    def healthy(self) -> bool:
        """True if everything that a run needs works."""
        return not self.problems


def doctor(*, as_json: bool) -> None:
    """Look, try, and say; exit code 1 if something that a run needs is broken."""
    with notes_on_stderr():
        health = examined()
    if as_json:
        show_json({**asdict(health), "healthy": health.healthy})
    else:
        show_table(("", ""), _rows(health), header=False)
        print("everything that a run needs works" if health.healthy else "something that a run needs is broken")
    if not health.healthy:
        raise typer.Exit(1)


def examined() -> Health:
    """Look at the machine, and let two workers talk on it."""
    problems: list[str] = []
    launcher, start_ms, all_reduce_ms = "unknown", None, None
    try:
        launcher = str(recognise(os.environ))
    except ValueError as error:
        problems.append(f"launcher: {error}")
    try:
        start_ms, all_reduce_ms = _two_workers_talk()
    except (PolytempoError, OSError, ValueError) as error:
        problems.append(f"two workers could not talk: {error}")
    shared = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    memory, memory_free = _memory()
    return Health(
        polytempo=polytempo.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        backends={name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi")},
        accelerator=accelerator_kind(),
        devices=num_devices(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=memory,
        memory_free=memory_free,
        shared_memory=shared and shared.total,
        shared_memory_free=shared and shared.free,
        native=instruction_set(),
        native_missing=why_not(),
        launcher=launcher,
        tools={name: shutil.which(name, path=_search_path()) is not None for name in _TOOLS},
        start_ms=start_ms,
        all_reduce_ms=all_reduce_ms,
        problems=problems,
        notes=untested(torch.__version__, platform.python_version()),
    )


def _two_workers_talk() -> tuple[float, float]:
    """Milliseconds until two workers had met, and for an all-reduce of 1 MB between them."""
    begun = time.monotonic()
    first, second = launch(_talk, workers=2, threads=1, timeout_s=_DEADLINE_S)
    if not (isinstance(first, list) and isinstance(second, list)):
        raise ValueError(f"expected a list from each worker, got {first!r} and {second!r}")
    met, took = (max(float(mine), float(other)) for mine, other in zip(first, second, strict=True))
    return 1000 * (met - begun), 1000 * took


def _talk(rank_info: RankInfo) -> list[float]:
    """One worker's part: the time when all had met, and the seconds of the best of five all-reduces."""
    store = FileStore(str(rank_info.rendezvous / "store"), rank_info.size)
    register()
    dist.init_process_group(
        _transport(),
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.size,
        timeout=timedelta(seconds=_DEADLINE_S),
    )
    met = time.monotonic()
    seconds = []
    for _ in range(5):
        buffer = torch.full((250_000,), float(rank_info.rank + 1))
        begun = time.monotonic()
        dist.all_reduce(buffer)
        seconds.append(time.monotonic() - begun)
        if not bool((buffer == rank_info.size * (rank_info.size + 1) / 2).all()):
            raise ValueError(f"rank {rank_info.rank}: the sum over {rank_info.size} workers is wrong")
    dist.destroy_process_group()
    return [met, min(seconds)]


def _transport() -> str:
    """The transport between workers of one host."""
    return "polytempo" if available() else "gloo"


def _search_path() -> str:
    """The search path of programs: beside this Python first, for a virtual environment need not be active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _memory() -> tuple[int | None, int | None]:
    """Memory in all and available, in bytes, where the system says it as Linux does."""
    table = Path("/proc/meminfo")
    if not table.is_file():
        return None, None
    found = dict(line.split(":", 1) for line in table.read_text(encoding="ascii").splitlines() if ":" in line)
    total, free = (found.get(key, "").split() for key in ("MemTotal", "MemAvailable"))
    return (int(total[0]) * 1024 if total else None, int(free[0]) * 1024 if free else None)


def _devices(health: Health) -> str:
    if health.accelerator is None:
        return "none: --device auto is the CPU"
    way = between_workers(health.accelerator)
    return f"{health.devices} of {health.accelerator}, which --device auto takes; tensors of workers travel {way}"


def _rows(health: Health) -> list[tuple[str, str]]:
    """The findings as lines for people."""

    def room(total: int | None, free: int | None) -> str:
        return "unknown" if total is None or free is None else f"{size(total)}, {size(free)} free"

    def there(found: dict[str, bool]) -> str:
        return ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in found.items())

    rows = [
        ("polytempo", health.polytempo),
        ("python", f"{health.python} on {health.platform}"),
        ("torch", f"{health.torch}; {there(health.backends)}"),
        ("accelerator", _devices(health)),
        ("cores", f"{health.cores}, torch uses {health.threads} threads"),
        ("memory", room(health.memory, health.memory_free)),
        ("shared memory", room(health.shared_memory, health.shared_memory_free)),
        ("native core", f"yes, {health.native}" if health.native else f"no: {health.native_missing}"),
        ("launcher", health.launcher),
        ("optional tools", there(health.tools)),
    ]
    if health.start_ms is not None and health.all_reduce_ms is not None:
        how = "shared memory" if health.native else "gloo"
        took = f"met in {health.start_ms:.0f} ms and add 1 MB in {health.all_reduce_ms:.2f} ms"
        rows.append(("self-check", f"2 workers {took}, through {how}"))
    rows += [("note", note) for note in health.notes]
    return rows + [("problem", problem) for problem in health.problems]


TESTED_TORCH = ("2.9", "2.11", "2.13", "2.14", "2.15")
TESTED_PYTHON = ("3.11", "3.12", "3.13")
"""The versions of torch and Python that `make test-torch` has passed with."""


def untested(torch_version: str, python: str) -> list[str]:
    """Sentences about untested ones of these two versions (such as "2.13.0+cpu", "3.11.7")."""
    found = (("torch", torch_version, TESTED_TORCH), ("Python", python, TESTED_PYTHON))
    return [
        f"{name} {version} is not tested with Polytempo; tested are {', '.join(tested)}"
        for name, version, tested in found
        if ".".join(version.split(".")[:2]) not in tested
    ]
