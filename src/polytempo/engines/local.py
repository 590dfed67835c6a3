"""The local engine: worker processes on this host, started together and ended together."""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.files import made
from polytempo.engines import janitor
from polytempo.engines.capacity import check_processes
from polytempo.engines.fork import held_signals
from polytempo.engines.worker import RankInfo, Result, result_path
from polytempo.engines.worker_processes import (
    GRACE_S,
    WorkerProcess,
    died,
    end,
    last_lines,
    look,
    quote,
    start,
    wait_all,
)

_TICK_S = 0.2
_POLL_S = 0.02
_LOOKS = 3


class RunTimedOut(PolytempoError):
    """The run was not over within `timeout_s`; `ranks` were still running."""

    def __init__(self, message: str, timeout_s: float, ranks: list[int]) -> None:
        self.timeout_s, self.ranks = timeout_s, ranks
        super().__init__(message)


def launch(
    work: Callable[[RankInfo], Result],
    workers: int,
    *,
    threads: int | None = None,
    logs: Path | None = None,
    timeout_s: float | None = None,
    tick: Callable[[], object] | None = None,
) -> list[Any]:
    """Call `work(rank_info)` in `workers` processes of this host; return what they returned, in the order of ranks.

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
    home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"  # short: sockets lie in it
    with janitor.swept(home) as notes:
        threads = threads_per_worker(workers, threads)
        folder = (home / "logs" if logs is None else logs).absolute()
        made(folder)
        crew: list[WorkerProcess] = []
        try:
            for rank in range(workers):
                rank_info = RankInfo(rank, workers, home, threads)
                with held_signals():  # between two starts a signal ends the run
                    crew.append(start(work, rank_info, folder / f"rank-{rank}.log", notes))
            _run(crew, timeout_s, tick)
        finally:
            end(crew)
        return [json.loads(result_path(home, rank).read_bytes()) for rank in range(workers)]


def threads_per_worker(workers: int, asked: int | None = None) -> int:
    """How many threads each of `workers` processes forked from this one may have (see `launch`).

    To be asked after a first fork (the janitor's): it lets libraries that can fork, like OpenBLAS,
    put their threads away. Those of OpenMP stay, and a child waits for ever for them to work.
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


def _run(crew: Sequence[WorkerProcess], timeout_s: float | None, tick: Callable[[], object] | None) -> None:
    """Wait until every worker has its result; raise as soon as one cannot have it any more."""
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while any(worker.exit_code is None for worker in crew):
        look(crew, min(deadline, time.monotonic() + _TICK_S) if tick else deadline)
        if any(worker.failed for worker in crew):
            wait_all(crew, time.monotonic() + GRACE_S)
            raise died([worker for worker in crew if worker.failed], len(crew))
        if timeout_s is not None and time.monotonic() >= deadline:
            raise _timed_out([worker for worker in crew if worker.exit_code is None], timeout_s)
        if tick:
            tick()


def _timed_out(running: Sequence[WorkerProcess], timeout_s: float) -> RunTimedOut:
    for worker in running:
        os.kill(worker.process, signal.SIGUSR1)  # faulthandler writes where it hangs into its log
    wait_all(running, time.monotonic() + GRACE_S)
    ranks = [worker.rank_info.rank for worker in running]
    who = ", ".join(f"rank {rank}" for rank in ranks)
    quoted = quote(f"Where rank {ranks[0]} was", last_lines(running[0].log, "(most recent call first)"))
    return RunTimedOut(f"the run was not over within {timeout_s:g} s; still running: {who}. {quoted}", timeout_s, ranks)
