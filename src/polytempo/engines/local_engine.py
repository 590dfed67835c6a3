"""The local engine: processes forked from this one, which start in milliseconds and have its functions and memory."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polytempo.core.system.files import made
from polytempo.engines.engine import EngineAddress, EngineProcess, Launch, Result, Role
from polytempo.engines.processes import janitor
from polytempo.engines.processes.fork import fork, held_signals
from polytempo.engines.processes.threads import threads_per_worker
from polytempo.engines.processes.worker import RankInfo, failure_of, result_path, serve
from polytempo.engines.processes.worker_processes import Child, Children


@dataclass(frozen=True)
class Local:
    """Processes of this host, forked from this one (the default)."""

    @contextmanager
    def open(self, launch: Launch) -> Iterator[LocalEngine]:
        """See `EngineSetup`. However this ends, killed launcher included, no process and no folder is left."""
        home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"  # short: sockets lie in it
        with janitor.swept(home) as notes:
            threads = threads_per_worker(launch.workers, launch.threads)
            logs = (home / "logs" if launch.logs is None else launch.logs).absolute()
            made(logs)
            engine = LocalEngine(
                launch.work, EngineAddress("127.0.0.1", threads, home, inherits=True), notes, logs, launch.most
            )
            try:
                yield engine
            finally:
                engine.stop()


class LocalEngine:
    """See `Engine`. `size` is what its processes take for their world's size."""

    def __init__(
        self, work: Callable[[Role], Result], address: EngineAddress, notes: int, logs: Path, size: int
    ) -> None:
        assert address.home is not None
        self._work, self._address, self._home, self._notes = work, address, address.home, notes
        self._logs, self._size = logs, size
        self._children = Children(self._read, self._home)

    @property
    def address(self) -> EngineAddress:
        """See `Engine`."""
        return self._address

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """See `Engine`. Its standard output goes to `logs/ROLE.log`."""
        rank_info = RankInfo(role.life, self._size, self._home, self._address.threads)
        log, launcher = self._logs / f"{role}.log", os.getpid()
        with held_signals():  # a process that has been started is known here, too
            pid = fork(lambda: serve(lambda _: self._work(role), rank_info, log, launcher, self._notes))
            child = self._children.add(Child(role, log, pid=pid, notes=self._notes))
        return child

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """See `Engine`."""
        return self._children.poll(wait_s)

    def stop(self, process: EngineProcess | None = None) -> None:
        """See `Engine`."""
        self._children.stop(process)

    def preempt(self) -> None:
        """See `Preempting`."""
        self._children.preempt()

    def ask_where(self, processes: Sequence[EngineProcess]) -> None:
        """Let processes write where they are into their logs."""
        self.signal(processes, signal.SIGUSR1)

    def signal(self, processes: Sequence[EngineProcess], number: signal.Signals) -> None:
        """Send a signal to those of `processes` that run."""
        self._children.signal(processes, number)

    def _read(self, child: Child) -> None:
        path = result_path(self._home, child.role.life)
        child.result = path.read_bytes() if path.exists() else None
        child.failure = failure_of(self._home, child.role.life)
