"""Processes of this host that this process has started, by fork or otherwise: watched, and ended for certain."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polytempo.engines.deaths.exit_cause import MemoryGroup
from polytempo.engines.engine import EngineProcess
from polytempo.engines.processes import janitor
from polytempo.engines.processes.fork import sleep_until_ended

_END_S = 2.0
"""A worker may take so long to end when asked."""
_LEFT_OVER_S = 0.5
"""The same for children of workers, such as data loaders; they are ended for one worker after another."""
_POLL_S = 0.02


@dataclass(eq=False)
class Child(EngineProcess):
    """A child of this process, which leads a process group of its own."""

    pid: int = -1
    notes: int = -1
    """The janitor's pipe (see `janitor.swept`)."""
    halted: bool = False
    """True while a signal holds this process itself; `stopped` counts the command that it runs, too."""

    @property
    def memory_bytes(self) -> int | None:
        """See `EngineProcess`: of this process, by /proc; 10 µs. None after its end, and on systems without /proc."""
        if self.exit_code is not None or self.pid <= 0:
            return None
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") or None


class ChildEngine(ABC):
    """An `Engine` with processes that this one starts. `home` is its private folder."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._all: list[Child] = []
        self._memory = MemoryGroup.of()
        self._told: set[Child] = set()
        """Children with an end that `poll` has reported."""

    @abstractmethod
    def _read(self, child: Child) -> None:
        """Fill in the result of a child that has ended."""

    def _add(self, child: Child) -> Child:
        """Know `child` from now on."""
        self._all.append(child)
        return child

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """See `Engine`."""
        look(self._all, time.monotonic() + wait_s)
        for child in self._all:
            if child.exit_code is None:
                child.stopped = child.halted or held_path(self._home, child.pid).exists()
        gone = [child for child in self._all if child.exit_code is not None and child not in self._told]
        self._told.update(gone)
        for child in gone:
            if child.exit_code == -signal.SIGKILL and self._memory is not None and self._memory.kills:
                child.why = self._memory.cause
            self._read(child)
        return list[EngineProcess](gone)

    def stop(self, process: EngineProcess | None = None) -> None:
        """See `Engine`. Stopped processes end, too."""
        if process is not None:
            self.signal([process], signal.SIGKILL)
            return
        self.signal(self._all, signal.SIGCONT)
        end(self._all)

    def preempt(self) -> None:
        """See `Preempting`."""
        self.signal(self._all, signal.SIGTERM)

    def ask_where(self, processes: Sequence[EngineProcess]) -> None:
        """Let processes write where they are into their logs."""
        self.signal(processes, signal.SIGUSR1)

    def signal(self, processes: Sequence[EngineProcess], number: signal.Signals) -> None:
        """Send a signal to the running ones among `processes`."""
        for child in self._all:
            if child in processes and child.exit_code is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, number)


def held_path(home: Path, process: int) -> Path:
    """A file that exists as long as a signal holds the command of `process`."""
    return home / f"held-{process}"


def look(crew: Sequence[Child], until: float) -> None:
    """Sleep until a running worker has ended, at most until `until`; note ended and stopped workers."""
    running = [worker for worker in crew if worker.exit_code is None]
    sleep_until_ended([worker.pid for worker in running], max(0.0, until - time.monotonic()))
    number = max((worker.ended for worker in crew), default=0) + 1
    for worker in running:
        status = _news(worker)
        if status is not None:
            worker.exit_code, worker.ended = os.waitstatus_to_exitcode(status), number
            _end_group(worker.pid)
            janitor.gone(worker.notes, worker.pid)


def _news(worker: Child) -> int | None:
    """The wait status of a process that has ended, else None. Meanwhile notes whether it was stopped, or continued.

    Where others have collected it, as a handler of SIGCHLD may, it counts as ended well if it has left a result.
    """
    while True:
        try:
            process, status = os.waitpid(worker.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return 0
        if not process:
            return None
        if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
            return status
        worker.halted = os.WIFSTOPPED(status)


def wait_all(crew: Sequence[Child], until: float) -> None:
    """Look until all have ended, at most until `until`."""
    while any(worker.exit_code is None for worker in crew) and time.monotonic() < until:
        look(crew, until)


def end(crew: Sequence[Child]) -> None:
    """End every worker and its children: politely, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in crew:
            if worker.exit_code is None:
                _signal(worker.pid, number)
        wait_all(crew, time.monotonic() + _END_S)


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # others have collected it
        os.kill(process, number)  # alone too: it may not lead its group yet
        if number == signal.SIGTERM:  # which it may take for a request to save and leave: see `core.system.notice`
            os.kill(process, signal.SIGHUP)
    with suppress(ProcessLookupError):
        os.killpg(process, number)


def _end_group(group: int) -> None:
    """End the leftovers of a worker that has just ended: data loaders and their like."""
    with suppress(ProcessLookupError, PermissionError):
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, number)
            deadline = time.monotonic() + _LEFT_OVER_S
            while _is_running(group) and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # they are not our children, so there is nothing to wait for
            with suppress(ChildProcessError):  # unless this process is the heir of orphans
                os.waitpid(-group, os.WNOHANG)


def _is_running(group: int) -> bool:
    """True if a process of a group runs; a dead process that waits for its collection does not."""
    os.killpg(group, 0)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(") ")[2].split()[:3]
            if its_group == str(group) and state not in "ZX":
                return True
    return not os.path.isdir("/proc/self")
