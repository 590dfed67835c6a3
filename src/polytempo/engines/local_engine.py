"""The local engine: processes forked from this one, which start in milliseconds and have its functions and memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.engines.collective import collected
from polytempo.engines.engine import EngineAddress, EngineProcess, Launch, Result, Role
from polytempo.engines.processes import janitor
from polytempo.engines.processes.capacity import check_processes
from polytempo.engines.processes.fork import fork, held_signals
from polytempo.engines.processes.worker import RankInfo, failure_of, result_path, serve
from polytempo.engines.processes.worker_processes import Child, ChildEngine
from polytempo.spec.topology import Topology


@dataclass(frozen=True)
class Local:
    """Processes of this host, forked from this one (the default)."""

    @contextmanager
    def open(self, launch: Launch) -> Iterator[LocalEngine]:
        """See `EngineSetup`. However this ends, killed launcher included, no process and no folder is left."""
        with janitor.engine_home(launch.logs) as (home, notes, logs):
            threads = threads_per_worker(launch.workers, launch.threads)
            engine = LocalEngine(
                launch.work, EngineAddress("127.0.0.1", threads, home, inherits=True), notes, logs, launch.most
            )
            try:
                yield engine
            finally:
                engine.stop()


class LocalEngine(ChildEngine):
    """See `Engine`. `size` is the world size that its processes assume."""

    def __init__(
        self, work: Callable[[Role], Result], address: EngineAddress, notes: int, logs: Path, size: int
    ) -> None:
        assert address.home is not None
        super().__init__(address.home)
        self._work, self.address, self._notes = work, address, notes
        self._logs, self._size = logs, size

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """See `Engine`. Its standard output goes to `logs/ROLE.log`."""
        rank_info = RankInfo(role.life, self._size, self._home, self.address.threads)
        log, launcher = self._logs / f"{role}.log", os.getpid()
        with held_signals():  # a process that has been started is known here, too
            pid = fork(lambda: serve(lambda _: self._work(role), rank_info, log, launcher, self._notes))
            child = self._add(Child(role, log, pid=pid, notes=self._notes))
        return child

    def _read(self, child: Child) -> None:
        path = result_path(self._home, child.role.life)
        child.result = path.read_bytes() if path.exists() else None
        child.failure = failure_of(self._home, child.role.life)


_POLL_S = 0.02
_LOOKS = 3


def threads_per_worker(workers: int, asked: int | None = None) -> int:
    """The number of threads that each of `workers` processes forked from this one may have (see `launch`).

    To be asked after a first fork (the janitor's): it lets libraries that can fork, like OpenBLAS, put their threads
    away. OpenMP's threads stay, and a child waits for ever for them to work.
    """
    strangers = _native_threads()
    if asked is None:
        return 1 if strangers else max(1, _cores() // workers)
    if asked < 1:
        raise ValueError(f"threads={asked} must be at least 1")
    if asked > 1 and strangers:
        raise ValueError(
            f"threads={asked} is impossible: this process has computed with several threads already ({strangers} are "
            "not Python's), and a worker forked from it would wait for ever in its first parallel loop; "
            "use threads=1, or start the run before anything is computed"
        )
    return asked


def _native_threads() -> int:
    """Threads of this process that are not Python's; 0 where there is no /proc to count them (macOS)."""
    if not os.path.isdir("/proc/self/task"):
        return 0
    strangers = 0
    for _ in range(_LOOKS):  # a thread that has just ended is listed for a moment longer
        strangers = max(0, len(os.listdir("/proc/self/task")) - threading.active_count())
        if strangers == 0:
            break
        time.sleep(_POLL_S)
    return strangers


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    work: Callable[[RankInfo], Result],
    workers: int,
    *,
    threads: int | None = None,
    logs: Path | None = None,
    timeout_s: float | None = None,
    tick: Callable[[], object] | None = None,
) -> list[Any]:
    """Call `work(rank_info)` in `workers` processes of this host; return their results, in the order of ranks.

    Workers are forked, so `work` may be a closure, and they start in milliseconds. Results travel as
    JSON (a tuple arrives as a list). A worker has `threads` threads: by default its share of the
    cores this process may use, or 1 where this process has already computed with several threads
    (OpenMP's threads do not survive a fork). Output goes to `logs/rank-R.log`; without `logs` it is
    only quoted in errors. Temporary files of workers end with the run. `tick` is called a few times
    a second while workers run, and may raise.

        launch(lambda rank_info: rank_info.rank ** 2, workers=3)      # [0, 1, 4]

    The first worker that fails ends the run. However it ends, killed launcher included, no process,
    folder or port is left; `logs` stay.

    Errors: `WorkerDied` names the rank, how it ended and its last lines; `RunTimedOut` after
    `timeout_s`, with the place where a worker hung; `ValueError` for impossible arguments.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    check_processes(workers, workers)

    def at(role: Role) -> Result:
        threads, home = engine.address.threads, engine.address.home
        assert home is not None
        return work(RankInfo(role.node, workers, home, threads))

    with Local().open(Launch(at, None, dict, workers, workers, threads, logs)) as engine:
        return collected(engine, Topology.collective(workers), tick, timeout_s)
