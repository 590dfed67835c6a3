"""A crew: worker processes of this host, as their launcher sees them. Started, watched, ended for certain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from polytempo.core.errors import JobFailed, NotFinite, PolytempoError
from polytempo.engines import janitor
from polytempo.engines.fork import fork
from polytempo.engines.worker import Failure, RankInfo, Result, failure_path, result_path, serve

GRACE_S = 0.3
"""How long other failures are collected after the first, to tell the cause from what it caused."""
_END_S = 2.0
"""How long a worker may take to end when asked."""
_LEFT_OVER_S = 0.5
"""The same for what workers have started, such as data loaders; they are seen to one worker after another."""
_POLL_S = 0.02
_LAST_LINES = 20
_LITTLE_BYTES = 64 << 10
_LAST_BYTES = 64 << 10


class WorkerDied(PolytempoError):
    """A worker ended without a result, and so did the run.

    `exit_code` is None where a signal killed it, and `signal` its name, like "SIGKILL", else None.
    `last_lines` are the last of its log. `not_finite` is what it raised, where that was a `NotFinite`.
    """

    not_finite: NotFinite | None = None

    def __init__(self, message: str, rank: int, exit_code: int | None, killed_by: str | None, last_lines: list[str]):
        self.rank, self.exit_code, self.signal, self.last_lines = rank, exit_code, killed_by, last_lines
        super().__init__(message)


@dataclass
class WorkerProcess:
    """One process of a crew."""

    rank_info: RankInfo
    process: int
    log: Path
    notes: int
    exit_code: int | None = None
    """As `os.waitstatus_to_exitcode` says it (a signal is negative); None while it runs."""
    stopped: bool = False
    """Whether a signal (SIGSTOP, SIGTSTP, …) holds it. A tracer that holds it is not seen."""
    ended: int = 0
    """Counts the looks at the workers; those with one number ended as good as together."""

    @property
    def failed(self) -> bool:
        """Whether it has ended without leaving a result."""
        if self.exit_code is None:
            return False
        return self.exit_code != 0 or not result_path(self.rank_info.rendezvous, self.rank_info.rank).exists()

    @property
    def failure(self) -> Failure | None:
        """Why it says that it failed, if it could say so."""
        path = failure_path(self.rank_info.rendezvous, self.rank_info.rank)
        return Failure(*json.loads(path.read_text())) if path.exists() else None


def start(work: Callable[[RankInfo], Result], rank_info: RankInfo, log: Path, notes: int) -> WorkerProcess:
    """Fork a process that does `work(rank_info)`; it writes to `log`."""
    launcher = os.getpid()
    return WorkerProcess(rank_info, fork(lambda: serve(work, rank_info, log, launcher, notes)), log, notes)


def look(crew: Sequence[WorkerProcess], until: float) -> None:
    """Sleep until a running worker has ended, at most until `until`; note which have, and which are stopped."""
    running = [worker for worker in crew if worker.exit_code is None]
    _sleep([worker.process for worker in running], max(0.0, until - time.monotonic()))
    number = max((worker.ended for worker in crew), default=0) + 1
    for worker in running:
        status = _news(worker)
        if status is not None:
            worker.exit_code, worker.ended = os.waitstatus_to_exitcode(status), number
            _end_group(worker.process)
            janitor.gone(worker.notes, worker.process)


def _news(worker: WorkerProcess) -> int | None:
    """How the process ended, if it has. Meanwhile notes whether it was stopped, or continued."""
    while True:
        process, status = os.waitpid(worker.process, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if not process:
            return None
        if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
            return status
        worker.stopped = os.WIFSTOPPED(status)


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


def wait_all(crew: Sequence[WorkerProcess], until: float) -> None:
    """Look until all have ended, at most until `until`."""
    while any(worker.exit_code is None for worker in crew) and time.monotonic() < until:
        look(crew, until)


def end(crew: Sequence[WorkerProcess]) -> None:
    """End every worker and whatever it started: politely, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in crew:
            if worker.exit_code is None:
                _signal(worker.process, number)
        wait_all(crew, time.monotonic() + _END_S)


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


def died(failed: Sequence[WorkerProcess], size: int, who: str | None = None, why: str = "") -> WorkerDied:
    """The error that names the first cause: who ended on its own rather than for want of a peer.

    `who` names it where it has another name than its rank; `why` is a sentence about what it waited for.
    """

    def order(worker: WorkerProcess) -> tuple[bool, int, bool, int]:
        symptom = worker.failure is not None and worker.failure.symptom
        return symptom, worker.ended, worker.failure is not None, worker.rank_info.rank

    cause, *others = sorted(failed, key=order)
    rank, code, lines = cause.rank_info.rank, cause.exit_code or 0, last_lines(cause.log, "Fatal Python error:")
    why += "" if cause.failure is not None and lines else _full_disks(cause.log.parent, cause.rank_info.rendezvous)
    quoted = quote(f"The last lines of {who or f'rank {rank}'}", lines)
    message = f"{who or f'rank {rank} of {size}'} {how(cause)}; the run has ended.{why} {quoted}"
    if others:
        message += "\nAlso: " + "; ".join(f"rank {worker.rank_info.rank} {how(worker)}" for worker in others)
    if code < 0:
        return WorkerDied(message, rank, None, _signal_name(-code), lines)
    error = WorkerDied(message, rank, code, None, lines)
    if cause.failure is not None and cause.failure.facts:
        error.not_finite = NotFinite.from_facts(cause.failure.facts)
    return error


@contextmanager
def diverged() -> Generator[None]:
    """Where a worker has ended with `NotFinite`, raise that: it says all there is to know."""
    try:
        yield
    except WorkerDied as error:
        if error.not_finite is None:
            raise
        raise error.not_finite from error


def _full_disks(*folders: Path) -> str:
    """A sentence about those folders where nothing can be written any more."""
    with suppress(OSError):
        full = [str(folder) for folder in folders if shutil.disk_usage(folder).free < _LITTLE_BYTES]
        return f" The disk of {' and '.join(full)} is full: free space there." if full else ""
    return ""


def how(worker: WorkerProcess) -> str:
    """How a process ended, in words."""
    code = worker.exit_code or 0
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    if failure := worker.failure:
        if failure.error == JobFailed.__name__:
            return f"failed: {failure.message} (exit code {code})"
        said = f": {failure.message}" if failure.message else ""
        return f"raised {failure.error}{said} (exit code {code})"
    return f"ended without a result (exit code {code})"


def _signal_name(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def quote(title: str, lines: Sequence[str]) -> str:
    """Lines of a log under a title."""
    return f"{title}:" + "".join(f"\n    | {line}" for line in lines or ["(nothing)"])


def last_lines(log: Path, stack: str) -> list[str]:
    """The last lines of a log, or the first ones from `stack` on: faulthandler begins with the innermost frame."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    begin = max((i for i, line in enumerate(lines) if stack in line), default=max(0, len(lines) - _LAST_LINES))
    return lines[begin : begin + _LAST_LINES]
