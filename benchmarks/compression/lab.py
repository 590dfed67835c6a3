"""Hosts that are network namespaces: a script makes them, and a process is started on each.

The script is not part of this project. It has to understand

    SCRIPT up -n HOSTS -r MBIT -d DELAY_MS      SCRIPT exec HOST COMMAND …      SCRIPT down

and to tell a command on host i its NODE_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LAB = {"NETLAB_NAME": "ptcodecs", "NETLAB_SUBNET": "10.78.0"}
_LAB |= {name: os.environ[name] for name in _LAB if name in os.environ}
"""A name of its own, so that another lab on this machine stays as it is."""
_SCRIPT_S, _GRACE_S, _POLL_S = 60.0, 5.0, 0.1


class LabFailed(RuntimeError):
    """A host's process, or the script, did not do its work."""


@contextmanager
def lab(script: Path, hosts: int, mbit_per_s: int, delay_ms: int = 0) -> Generator[None]:
    """So many hosts, each with a link of that rate in either direction, that far apart. They are gone afterwards."""
    _call(script, "up", "-n", str(hosts), "-r", str(mbit_per_s), "-d", str(delay_ms))
    try:
        yield
    finally:
        _call(script, "down")


def on_every_host(script: Path, hosts: int, command: Sequence[str], timeout_s: float) -> None:
    """Run `command` on each host as one rank of a world, as torchrun would. The first that fails ends all.

    A process that was started here ends with this one, however that ends: its standard input closes.
    """
    processes = []
    with tempfile.TemporaryDirectory(prefix="polytempo-lab-") as folder:
        logs = [Path(folder) / f"host-{host}.log" for host in range(hosts)]
        try:
            for host, log in enumerate(logs):
                processes.append(_started(script, host, hosts, command, log))
            _wait(processes, logs, time.monotonic() + timeout_s)
        finally:
            _end(processes)


def _started(script: Path, host: int, hosts: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": host, "WORLD_SIZE": hosts, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": host}
    environ = os.environ | _LAB | {key: str(value) for key, value in place.items()} | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as written:
        return subprocess.Popen(
            ["bash", str(script), "exec", str(host), *command],
            stdin=subprocess.PIPE,
            stdout=None if host == 0 else written,
            stderr=written,
            env=environ,
            start_new_session=True,  # so that the whole of it can be ended
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], until_s: float) -> None:
    running = dict(enumerate(processes))
    while running:
        for host, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[host]
            if process.returncode:
                said = logs[host].read_text(encoding="utf-8", errors="replace")[-2000:]
                raise LabFailed(f"host {host} ended with {process.returncode}:\n{said}")
        if time.monotonic() > until_s:
            raise LabFailed(f"hosts {sorted(running)} were not ready in time")
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let the processes that were started here go, and end the remaining ones."""
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    until_s = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session, begun by us
            process.wait()


def _call(script: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["bash", str(script), *arguments],
        env=os.environ | _LAB,
        capture_output=True,
        text=True,
        timeout=_SCRIPT_S,
        check=False,
    )
    if done.returncode:
        raise LabFailed(f"{script.name} {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    if done.stdout.strip():
        print(done.stdout.strip(), file=sys.stderr)
