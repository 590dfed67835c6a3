"""Measure the loss of a run while fifty pages look at it. Phases with and without them take turns within one run.

A step is held up where a worker, or the launcher, could compute and waits for a core. The system counts this time of
each thread (`/proc/PID/task/ID/schedstat`): its sum over all threads of the run bounds the loss, and needs no
comparison of rates, which other programs move. The threads that stand for the browsers take only time that no other
process wants, because browsers have cores of their own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

CLIENTS = 50


class Clients:
    """Streams of the run's page, read by threads at the lowest priority."""

    def __init__(self, link: str, run: str) -> None:
        parts = urlsplit(link)
        self._netloc = parts.netloc
        self._query = f"/events?kind=run&run={run}&pixels=300"
        connection = http.client.HTTPConnection(self._netloc, timeout=120)
        connection.request("GET", f"/?{parts.query}")
        self._cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
        connection.close()
        self._open: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self.num_bytes = 0

    def connect(self) -> None:
        """Open all streams."""
        for _ in range(CLIENTS):
            connection = http.client.HTTPConnection(self._netloc, timeout=120)
            connection.request("GET", self._query, headers={"Cookie": self._cookie})
            self._open.append(connection)
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: http.client.HTTPConnection) -> None:
        with suppress(OSError, AttributeError, ValueError, http.client.HTTPException):
            answer = connection.getresponse()
            while content := answer.read1(1 << 16):
                with self._lock:
                    self.num_bytes += len(content)

    def close(self) -> None:
        """Close all streams."""
        for connection in self._open:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(2)
                connection.close()
        self._open.clear()


def last_row(metrics: Path) -> tuple[int, float]:
    """Steps and seconds of the last row of training."""
    with metrics.open("rb") as stream:
        stream.seek(max(0, metrics.stat().st_size - 4096))
        rows = [json.loads(line) for line in stream.read().split(b"\n")[1:-1]]
    row = next(row for row in reversed(rows) if row["kind"] == "train")
    return row["step"], row["seconds"]


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_s(processes: list[int]) -> dict[str, float]:
    """Thread -> its seconds so far without a core although it could compute."""
    found = {}
    for process in processes:
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def processes_of(launcher: int, server: int) -> list[int]:
    """The launcher and all that it has begun, but for the page."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [launcher]
    while left:
        process = left.pop()
        if process != server:
            found.append(process)
            left += children.get(process, [])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "run")
        command = [*(sys.executable, "-m", "polytempo", "train", "digits", "--workers", "2"), "--epochs", "1000000"]
        command += ["--ui", "--out", str(out), "--checkpoint-every", "100000"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            assert process.stderr is not None
            link = next(found[1] for line in process.stderr if (found := re.search(r"live page: (\S+?)#", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            try:
                measure(asked.turns, asked.seconds, Clients(link, "."), out / "metrics.jsonl", process.pid)
            finally:
                process.send_signal(signal.SIGTERM)  # a shell in the background ignores Ctrl-C


def server_of(launcher: int) -> int:
    """The process of the page: the launcher's child with that program."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"polytempo.ui" in arguments:
                return int(folder.name)
    raise SystemExit("the page's process is not there")


def measure(turns: int, seconds: float, clients: Clients, metrics: Path, launcher: int) -> None:
    """Ratios of neighbouring phases: the rate with the pages / without them; and waits for a core in both."""
    while not metrics.exists() or metrics.stat().st_size < 4096:
        time.sleep(0.2)
    rates: dict[bool, list[float]] = {False: [], True: []}
    used: dict[bool, list[float]] = {False: [], True: []}
    held: dict[bool, list[float]] = {False: [], True: []}
    server = server_of(launcher)
    run = processes_of(launcher, server)
    for turn in range(2 * turns):
        watched = turn % 4 in (1, 2)  # without, with, with, without: a drift of the machine cancels
        if watched:
            clients.connect()
        time.sleep(1.0)
        (step, at_s), before_s, began_s, waited = last_row(metrics), cpu_s(server), time.monotonic(), waited_s(run)
        time.sleep(seconds)
        (end, end_s), passed_s = last_row(metrics), time.monotonic() - began_s
        waits = waited_s(run)
        held[watched].append(sum(waits[each] - waited[each] for each in waits.keys() & waited) / passed_s)
        rates[watched].append((end - step) / (end_s - at_s))
        used[watched].append((cpu_s(server) - before_s) / passed_s)
        clients.close()
    ratios = sorted(one / two for one, two in zip(rates[True], rates[False], strict=True))
    quarters = statistics.quantiles(ratios * 2 if turns == 1 else ratios, n=4)
    print(f"| pages | steps/s, median of {turns} phases of {seconds:g} s", end=" | ")
    print("the page's share of a core | the run waits for a core |\n|---|---|---|---|")
    for watched, count in ((False, 0), (True, CLIENTS)):
        print(f"| {count} | {statistics.median(rates[watched]):,.0f}", end=" | ")
        print(" | ".join(f"{100 * statistics.median(each[watched]):.2f} %" for each in (used, held)), end=" |\n")
    print(f"\nratio with / without: median {quarters[1]:.4f}, quartiles {quarters[0]:.4f} to {quarters[2]:.4f}")
    print(f"{clients.num_bytes / 1e6:.1f} MB were read by the pages")


if __name__ == "__main__":
    main()
