"""Floods by a stranger on this host, who can reach every port of a run and has none of its keys.

    python benchmarks/attacks/floods.py [--runs served elastic] [--floods calm idle bytes slow values] [--epochs 40]

    idle      1,500 connections to one port that say nothing
    bytes     150 connections, each a greeting and all but the end of a command, of 16 MiB or of one part (128 KiB)
    slow      200 connections of one byte a second
    values    clients of torch's store, which leave 280 MiB of values where they are taken

A run has a soft limit of 1,024 descriptors. Each flood's row: a good end or not, the most memory and descriptors of any
process, and the seconds; a calm run's numbers stand next to them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

from polytempo.bench.tables import markdown
from polytempo.core.system import descriptors

RUNS = {
    "served": ["--strategy", "async_sgd(shards=2)", "--transport", "tcp"],
    "elastic": ["--strategy", "sync_sgd", "--min-workers", "1"],
}
NUM_PORTS = {"served": 6, "elastic": 1}
"""The launcher, two shards, two workers and the evaluator; the launcher alone."""
SOFT = 1024
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
COMMANDS = [GREETING + b"\x06" + length.to_bytes(8, "big") + bytes(length - 1) for length in (16 << 20, 128 << 10)]
VALUE = "x" * (8 << 20)
_LOOK_S = 0.2
_LISTENS = "0A"

Ports = list[int]


class Seen(NamedTuple):
    """The most that any process of a run came to."""

    memory_mib: float
    descriptors: int


def processes(root: int) -> list[int]:
    """`root` and all that it has started."""
    found = [root]
    for process in found:
        with suppress(OSError):
            for task in Path(f"/proc/{process}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def ports(of: list[int]) -> Ports:
    """The ports that listen on loopback."""
    inodes = set()
    for process in of:
        with suppress(OSError):
            inodes |= {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in inodes]


def seen(of: list[int]) -> Seen:
    """Their memory and descriptors now."""
    memory, opened = [0.0], [0]
    for process in of:
        with suppress(OSError):
            memory.append(int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)
            opened.append(len(os.listdir(f"/proc/{process}/fd")))
    return Seen(max(memory), max(opened))


# --------------------------------------------------------------------------------------------------------- strangers


def connected(where: Ports, most: int) -> Iterator[socket.socket]:
    """Connections in turn to each port, that do not wait."""
    for number in range(most):
        with suppress(OSError):
            one = socket.create_connection(("127.0.0.1", where[number % len(where)]), timeout=5.0)
            one.setblocking(False)
            yield one


def kept_up(where: Ports, most: int, say: Sequence[bytes], part_bytes: int, pause_s: float) -> None:
    """Hold `most` connections, and send the parts of `say` on each, every `pause_s`."""
    held: dict[socket.socket, memoryview] = {}
    while True:
        for one in connected(where, most - len(held)):
            held[one] = memoryview(say[len(held) % len(say)])
        for one, rest in list(held.items()):
            try:
                held[one] = rest[one.send(rest[:part_bytes]) if rest else 0 :]
                if one.recv(1 << 16) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                del held[one]
                one.close()
        time.sleep(pause_s)


def values(where: Ports) -> None:
    """Leave values in every store of torch's that takes them."""
    for port in where:
        with suppress(Exception):
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
            for number in range(35):
                store.set(f"stranger/{number}", VALUE)
    time.sleep(1e6)


FLOODS: dict[str, Callable[[Ports], None] | None] = {
    "calm": None,
    "idle": lambda where: kept_up(where[:1], 1_500, [b""], 1, 0.1),
    "bytes": lambda where: kept_up(where, 150, COMMANDS, 1 << 20, 0.0),
    "slow": lambda where: kept_up(where, 200, [GREETING], 1, 1.0),
    "values": values,
}


# ------------------------------------------------------------------------------------------------------------- a run


def flooded(name: str, flood: Callable[[Ports], None] | None, epochs: int) -> list[str]:
    """The end of one run: how, the most memory and descriptors of a process, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "polytempo", "train", "digits", "--workers", "2", "--epochs", str(epochs)]
        since_s = time.monotonic()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        process = subprocess.Popen(
            [*command, "--threads", "1", "--out", f"{folder}/run", *RUNS[name]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard)),
        )
        where: Ports = []
        while process.poll() is None and len(where) < NUM_PORTS[name]:
            time.sleep(_LOOK_S)
            where = ports(processes(process.pid))
        stranger = multiprocessing.Process(target=flood, args=(where,), daemon=True) if flood else None
        if stranger is not None:
            stranger.start()
        most = Seen(0, 0)
        try:
            while process.poll() is None:
                most = Seen(*map(max, most, seen(processes(process.pid))))
                time.sleep(_LOOK_S)
        finally:
            if stranger is not None:
                stranger.kill()
        assert process.stderr is not None
        said = process.stderr.read().strip().splitlines()
        ended = "ended well" if process.returncode == 0 else f"code {process.returncode}: {(said or [''])[-1][:80]}"
        seconds = time.monotonic() - since_s
        return [ended, f"{most.memory_mib:.0f}", f"{most.descriptors}", f"{seconds:.1f}"]


def main() -> None:
    """All floods of all runs, as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--epochs", type=int, default=40)
    given = parser.parse_args()
    descriptors.raised()
    chosen = [(run, flood) for run in given.runs for flood in given.floods]
    rows = [[run, flood, *flooded(run, FLOODS[flood], given.epochs)] for run, flood in chosen]
    print(markdown((["run", "flood", "it", "MiB", "descriptors", "seconds"], rows)))


if __name__ == "__main__":
    main()
