"""`HostSample`: the state of a slow rank's host, and the cause that two samples show.

    asked ── sample ── a few steps ── sample ──▶ `cause_between` ──▶ "1.9 cores are used by pid 4711 (stress)"

Nothing is read before a rank was found slow. Linux only; elsewhere samples are empty and no cause is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOST_PROCESSES = 4096
_MOST_BYTES = 1 << 16


class ProcessTime(NamedTuple):
    """Processor time of one process."""

    name: str
    parent: int
    seconds: float
    """User and system time so far."""
    core: int
    """The core that it ran on last."""


class HostSample(NamedTuple):
    """One moment of a rank's host. Seconds are totals; None where the system does not say."""

    at_s: float = 0.0
    own: tuple[int, int] = (0, 0)
    """Process and parent process of the rank."""
    cores: frozenset[int] = frozenset()
    """Cores that the rank may use."""
    processes: dict[int, ProcessTime] = {}  # noqa: RUF012 (a NamedTuple's default, which is only read)
    throttled_s: float | None = None
    """Time without processors because the cgroup had used its quota."""
    queued_s: float | None = None
    """Time that the rank's threads were ready and had no core."""
    clock_share: float | None = None
    """The cores' present frequency over their highest one."""
    memory_stall_s: float | None = None
    """Time while some task of the host waited for memory."""
    major_faults: int = 0


def host_sample(at_s: float, root: Path = Path("/")) -> HostSample:
    """Read this process's host. Cost: about 20 µs for each process of the host."""
    own, proc = (os.getpid(), os.getppid()), root / "proc"
    cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
    faults = _fields(proc / str(own[0]) / "stat")
    return HostSample(
        at_s=at_s,
        own=own,
        cores=cores,
        processes=dict(_processes(proc)),
        throttled_s=_throttled_s(root),
        queued_s=_queued_s(proc / str(own[0])),
        clock_share=_clock_share(root / "sys/devices/system/cpu", cores),
        memory_stall_s=_memory_stall_s(proc / "pressure/memory"),
        major_faults=int(faults[9]) if len(faults) > 9 else 0,
    )


def cause_between(before: HostSample, after: HostSample, slower: float) -> str:
    """The cause of a rank's slowness in words, from its host at two moments; "" if nothing there explains it.

    `slower`: how much longer the rank takes, as a part. A cause that takes a third of that is named; the first of
    throttling, other processes, memory, frequency.
    """
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return ""
    enough = max(0.05, slower / (1 + slower) / 3)
    throttled = _share(before.throttled_s, after.throttled_s, seconds)
    if throttled > enough:
        return f"its cgroup's quota of processors throttles it {throttled:.0%} of the time"
    used = _other_processes(before, after, seconds)
    if used and used[0][0] > enough:
        cores, pid, name = used[0]
        others = len([each for each in used[1:] if each[0] > enough])
        more = f" and {others} more processes" if others else ""
        return f"{cores:.1f} cores are used by pid {pid} ({name}){more}"
    stalled = _share(before.memory_stall_s, after.memory_stall_s, seconds)
    if stalled > enough:
        faults = after.major_faults - before.major_faults
        return f"its host is short of memory: tasks wait for it {stalled:.0%} of the time, {faults:,} major page faults"
    if after.clock_share is not None and after.clock_share < 1 - enough:
        return f"its cores run at {after.clock_share:.0%} of their highest frequency"
    queued = _share(before.queued_s, after.queued_s, seconds)
    if queued > enough:
        return f"it is ready and has no core {queued:.0%} of the time"
    return ""


def _share(before: float | None, after: float | None, seconds: float) -> float:
    return 0.0 if before is None or after is None else min(1.0, max(0.0, after - before) / seconds)


def _other_processes(before: HostSample, after: HostSample, seconds: float) -> list[tuple[float, int, str]]:
    """(cores, pid, name) of processes on the rank's cores that are not of the run, the busiest first."""
    pid, parent = after.own
    found = []
    for other, now in after.processes.items():
        was = before.processes.get(other)
        of_the_run = other in (pid, parent) or now.parent in (pid, parent)
        if was is not None and not of_the_run and (not after.cores or now.core in after.cores):
            found.append(((now.seconds - was.seconds) / seconds, other, now.name))
    return sorted(found, reverse=True)


# ------------------------------------------------------------------------------------------------ files of the system


def _text(path: Path) -> str:
    with suppress(OSError), path.open("rb") as stream:
        return stream.read(_MOST_BYTES).decode(errors="replace")
    return ""


def _fields(stat: Path) -> list[str]:
    """The fields of a `stat` file from the state on: its second field, the name, may hold anything."""
    return _text(stat).rpartition(")")[2].split()


def _processes(proc: Path) -> Iterator[tuple[int, ProcessTime]]:
    tick_s = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
    names = []
    with suppress(OSError):
        names = [each.name for each in proc.iterdir() if each.name.isdecimal()]
    for name in names[:_MOST_PROCESSES]:
        text = _text(proc / name / "stat")
        head, _, rest = text.rpartition(")")
        fields = rest.split()
        if len(fields) > 36:
            seconds = (int(fields[11]) + int(fields[12])) * tick_s
            yield int(name), ProcessTime(head.partition("(")[2], int(fields[1]), seconds, int(fields[36]))


def _throttled_s(root: Path) -> float | None:
    own = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    for folder in (root / "sys/fs/cgroup" / own.lstrip("/"), root / "sys/fs/cgroup"):
        for line in _text(folder / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "throttled_usec" and value.strip().isdecimal():
                return int(value) / 1e6
    return None


def _queued_s(process: Path) -> float | None:
    fields = _text(process / "schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 and fields[1].isdecimal() else None


def _clock_share(folder: Path, cores: frozenset[int]) -> float | None:
    shares = []
    for core in sorted(cores):
        now, most = (_text(folder / f"cpu{core}/cpufreq/{name}") for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
        if now.strip().isdecimal() and most.strip().isdecimal() and int(most):
            shares.append(int(now) / int(most))
    return sum(shares) / len(shares) if shares else None


def _memory_stall_s(pressure: Path) -> float | None:
    for line in _text(pressure).splitlines():
        kind, *pairs = line.split()
        if kind == "some":
            for pair in pairs:
                name, _, value = pair.partition("=")
                if name == "total" and value.isdecimal():
                    return int(value) / 1e6
    return None
