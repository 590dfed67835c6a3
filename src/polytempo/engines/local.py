"""The local engine: worker processes on this host, started together and ended together."""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.engines import janitor
from polytempo.engines.fork import fork, held_signals
from polytempo.engines.worker import Failure, Result, Seat, failure_path, result_path, serve

_GRACE_S = 0.3
"""How long other failures are collected after the first, to tell the cause from what it caused."""
_END_S = 2.0
"""How long a worker may take to end when asked."""
_LEFT_OVER_S = 0.5
"""The same for what workers have started, such as data loaders; they are seen to one worker after another."""
_TICK_S = 0.2
_POLL_S = 0.02
_LOOKS = 3
_LAST_LINES = 20
_LAST_BYTES = 64 << 10


class WorkerDied(PolytempoError):
    """A worker ended without a result, and so did the run.

    `exit_code` is None where a signal killed it, and `signal` its name, like "SIGKILL", else None.
    `last_lines` are the last of its log.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None, killed_by: str | None, last_lines: list[str]):
        self.rank, self.exit_code, self.signal, self.last_lines = rank, exit_code, killed_by, last_lines
        super().__init__(message)


class RunTimedOut(PolytempoError):
    """The run was not over within `timeout_s`; `ranks` were still running."""

    def __init__(self, message: str, timeout_s: float, ranks: list[int]) -> None:
        self.timeout_s, self.ranks = timeout_s, ranks
        super().__init__(message)


@dataclass
class _Worker:
    seat: Seat
    process: int
    log: Path
    notes: int
    exit_code: int | None = None
    """As `os.waitstatus_to_exitcode` says it (a signal is negative); None while it runs."""
    ended: int = 0
    """Counts the looks at the workers; those with one number ended as good as together."""

    @property
    def failed(self) -> bool:
        if self.exit_code is None:
            return False
        return self.exit_code != 0 or not result_path(self.seat.rendezvous, self.seat.rank).exists()

    @property
    def failure(self) -> Failure | None:
        path = failure_path(self.seat.rendezvous, self.seat.rank)
        return Failure(*json.loads(path.read_text())) if path.exists() else None


def launch(
    work: Callable[[Seat], Result],
    workers: int,
    *,
    threads: int | None = None,
    logs: Path | None = None,
    timeout_s: float | None = None,
    tick: Callable[[], object] | None = None,
) -> list[Any]:
    """Call `work(seat)` in `workers` processes of this host; return what they returned, in the order of ranks.

    Workers are forked, so `work` may be a closure, and they start in milliseconds. Results travel as
    JSON (a tuple arrives as a list). A worker has `threads` threads: by default its share of the
    cores this process may use, or 1 where this process has already computed with several threads
    (OpenMP's threads do not survive a fork). Output goes to `logs/rank-R.log`; without `logs` it is
    only quoted in errors. Temporary files of workers end with the run. `tick` is called a few times
    a second while workers run, and may raise.

        launch(lambda seat: seat.rank ** 2, workers=3)      # [0, 1, 4]

    The first worker that fails ends the run. However it ends, killed launcher included, no process,
    folder or port is left; `logs` stay.

    Errors: `WorkerDied` names the rank, how it ended and its last lines; `RunTimedOut` after
    `timeout_s`, with the place where a worker hung; `ValueError` for impossible arguments.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"  # short: sockets lie in it
    with janitor.swept(home) as notes:
        threads = threads_per_worker(workers, threads)
        folder = (home / "logs" if logs is None else logs).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        crew: list[_Worker] = []
        try:
            with held_signals():
                for rank in range(workers):
                    seat = Seat(rank, workers, home, threads)
                    crew.append(_start(work, seat, folder / f"rank-{rank}.log", notes))
            _run(crew, timeout_s, tick)
        finally:
            _end(crew)
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


def _start(work: Callable[[Seat], Result], seat: Seat, log: Path, notes: int) -> _Worker:
    launcher = os.getpid()
    return _Worker(seat, fork(lambda: serve(work, seat, log, launcher, notes)), log, notes)


def _run(crew: Sequence[_Worker], timeout_s: float | None, tick: Callable[[], object] | None) -> None:
    """Wait until every worker has its result; raise as soon as one cannot have it any more."""
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while any(worker.exit_code is None for worker in crew):
        _look(crew, min(deadline, time.monotonic() + _TICK_S) if tick else deadline)
        if any(worker.failed for worker in crew):
            _wait_all(crew, time.monotonic() + _GRACE_S)
            raise _died([worker for worker in crew if worker.failed], len(crew))
        if timeout_s is not None and time.monotonic() >= deadline:
            raise _timed_out([worker for worker in crew if worker.exit_code is None], timeout_s)
        if tick:
            tick()


def _look(crew: Sequence[_Worker], until: float) -> None:
    """Sleep until a running worker has ended, at most until `until`; note which have."""
    running = [worker for worker in crew if worker.exit_code is None]
    _sleep([worker.process for worker in running], max(0.0, until - time.monotonic()))
    number = max(worker.ended for worker in crew) + 1
    for worker in running:
        process, status = os.waitpid(worker.process, os.WNOHANG)
        if process:
            worker.exit_code, worker.ended = os.waitstatus_to_exitcode(status), number
            _end_group(process)
            janitor.gone(worker.notes, process)


def _sleep(processes: Iterable[int], timeout_s: float) -> None:
    """Sleep until one of the processes, children not yet waited for, has ended, at most `timeout_s`."""
    descriptors: list[int] = []
    try:
        for process in processes:
            descriptors.append(os.pidfd_open(process))
        wait(descriptors, None if timeout_s == float("inf") else timeout_s)
    except (AttributeError, OSError):  # macOS and some sandboxes have no pidfd: look again soon
        time.sleep(min(timeout_s, _POLL_S))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_all(crew: Sequence[_Worker], until: float) -> None:
    while any(worker.exit_code is None for worker in crew) and time.monotonic() < until:
        _look(crew, until)


def _end(crew: Sequence[_Worker]) -> None:
    """End every worker and whatever it started: politely, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in crew:
            if worker.exit_code is None:
                _signal(worker.process, number)
        _wait_all(crew, time.monotonic() + _END_S)


def _signal(process: int, number: signal.Signals) -> None:
    os.kill(process, number)  # alone too: it may not lead its group yet
    with suppress(ProcessLookupError):
        os.killpg(process, number)


def _end_group(group: int) -> None:
    """End what a worker that has just ended left: data loaders and their like."""
    with suppress(ProcessLookupError, PermissionError):
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, number)
            deadline = time.monotonic() + _LEFT_OVER_S
            while _is_running(group) and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # they are not our children, so there is nothing to wait for
            with suppress(ChildProcessError):  # unless this process is the one that inherits orphans
                os.waitpid(-group, os.WNOHANG)


def _is_running(group: int) -> bool:
    """Whether one of a group runs; a dead one that nobody has collected yet does not."""
    os.killpg(group, 0)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(") ")[2].split()[:3]
            if its_group == str(group) and state not in "ZX":
                return True
    return not os.path.isdir("/proc/self")


def _died(failed: Sequence[_Worker], size: int) -> WorkerDied:
    """The error that names the first cause: who ended on its own rather than for want of a peer."""

    def order(worker: _Worker) -> tuple[bool, int, bool, int]:
        symptom = worker.failure is not None and worker.failure.symptom
        return symptom, worker.ended, worker.failure is not None, worker.seat.rank

    cause, *others = sorted(failed, key=order)
    rank, code, lines = cause.seat.rank, cause.exit_code or 0, _last_lines(cause.log, "Fatal Python error:")
    quote = _quote(f"The last lines of rank {rank}", lines)
    message = f"rank {rank} of {size} {_how(cause)}; the run has ended. {quote}"
    if others:
        message += "\nAlso: " + "; ".join(f"rank {worker.seat.rank} {_how(worker)}" for worker in others)
    if code < 0:
        return WorkerDied(message, rank, None, _signal_name(-code), lines)
    return WorkerDied(message, rank, code, None, lines)


def _how(worker: _Worker) -> str:
    code = worker.exit_code or 0
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    if worker.failure:
        return f"raised {worker.failure.error} (exit code {code})"
    return f"ended without a result (exit code {code})"


def _signal_name(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _timed_out(running: Sequence[_Worker], timeout_s: float) -> RunTimedOut:
    for worker in running:
        os.kill(worker.process, signal.SIGUSR1)  # faulthandler writes where it hangs into its log
    _wait_all(running, time.monotonic() + _GRACE_S)
    ranks = [worker.seat.rank for worker in running]
    who = ", ".join(f"rank {rank}" for rank in ranks)
    quote = _quote(f"Where rank {ranks[0]} was", _last_lines(running[0].log, "(most recent call first)"))
    return RunTimedOut(f"the run was not over within {timeout_s:g} s; still running: {who}. {quote}", timeout_s, ranks)


def _quote(title: str, lines: Sequence[str]) -> str:
    return f"{title}:" + "".join(f"\n    | {line}" for line in lines or ["(nothing)"])


def _last_lines(log: Path, stack: str) -> list[str]:
    """The last lines of a log, or the first ones from `stack` on: faulthandler begins with the innermost frame."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    begin = max((i for i, line in enumerate(lines) if stack in line), default=max(0, len(lines) - _LAST_LINES))
    return lines[begin : begin + _LAST_LINES]
