"""Open MPI as a peer. mpirun starts its own ranks, so each of our workers has a partner among them (`mpi_rank`).

worker 0 ═ socket ═ MPI rank 0      On MPI's turn each worker asks its partner and sleeps until the answer comes;
worker 1 ═ socket ═ MPI rank 1      on all other turns the partners sleep.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WAIT_S = 120.0
_END_S = 10.0
_QUIET = ("--quiet", "--mca", "btl_base_warn_component_unused", "0", "--mca", "orte_base_help_aggregate", "1")


class Peers:
    """The launcher's view of MPI's ranks."""

    def __init__(self, process: subprocess.Popen[str], listeners: list[socket.socket], log: Path) -> None:
        self._process, self._listeners, self._log = process, listeners, log

    def check(self) -> None:
        """Raise RuntimeError with mpirun's words if it has ended early."""
        if self._process.poll() not in (None, 0):
            last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-10:]
            raise RuntimeError(
                "mpirun ended with code {}; it said:\n{}".format(self._process.returncode, "\n".join(last))
            )

    def partner(self, rank: int) -> Partner:
        """The partner of worker `rank`; called once, in that worker."""
        return Partner(self._listeners[rank])


class Partner:
    """A worker's view of its own MPI rank. The rank ends when the connection does."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(WAIT_S)
        self._connection, _ = listener.accept()
        self._connection.settimeout(WAIT_S)
        self._stream = self._connection.makefile("rw", encoding="ascii")

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *how: object) -> None:
        self._stream.close()
        self._connection.close()

    def run(self, operation: str, num_bytes: int) -> Callable[[int], list[float]]:
        """The operation as a contender's `run`; all workers ask at the same time."""

        def ask(calls: int) -> list[float]:
            print(json.dumps({"operation": operation, "num_bytes": num_bytes, "calls": calls}), file=self._stream)
            self._stream.flush()
            answer = self._stream.readline()
            if not answer:
                raise ConnectionError("the MPI rank has ended; its log says why")
            return [float(seconds) for seconds in json.loads(answer)]

        return ask


def missing() -> str | None:
    """The reason that MPI is not measured here, and the remedy; None if it can be."""
    if find_spec("mpi4py") is None:
        return "no mpi4py in this Python; `pip install mpi4py` brings it"
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return "no mpirun on the PATH; install Open MPI (Debian: openmpi-bin libopenmpi-dev)"
    said = subprocess.run(  # noqa: S603  # found on the user's own PATH
        [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    return None if "Open MPI" in said.stdout else f"{mpirun} is not Open MPI's, and lacks the options that are needed"


@contextmanager
def peers(size: int) -> Iterator[Peers]:
    """`size` MPI ranks, asleep, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="polytempo-") as folder:  # a short path, as sockets need
        home = Path(folder)
        listeners = [_listener(home / str(rank)) for rank in range(size)]
        log = home / "log"
        with log.open("w", encoding="utf-8") as said:
            process = subprocess.Popen(  # noqa: S603  # a command of our own
                _command(size, home), env=_environment(home), stdout=said, stderr=said, text=True
            )
        try:
            yield Peers(process, listeners, log)
        finally:
            for listener in listeners:
                listener.close()
            _end(process)


def _command(size: int, home: Path) -> list[str]:
    mpirun = shutil.which("mpirun")
    assert mpirun is not None
    options = ["-n", str(size), "--oversubscribe", "--bind-to", "none", *_QUIET]
    return [mpirun, *options, sys.executable, "-P", "-m", "polytempo.bench.mpi_rank", str(home)]


def _environment(home: Path) -> dict[str, Any]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return os.environ | allowed | {"TMPDIR": str(home), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def _end(process: subprocess.Popen[str]) -> None:
    """The ranks end with their partners, and mpirun with them; if not, they are made to."""
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):  # the first changes nothing
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
