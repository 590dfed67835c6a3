"""Workers and hosts of a synchronous digits run on four hosts are killed, stopped, cut off and sent away.

    python benchmarks/elastic/hosts.py --namespaces h0 h1 h2 h3 --address 10.0.0.1 [--runs 3] [--seed 1]

Run it as root in the first of four network namespaces; the processes of each host get a PID namespace of their own, so
no memory is shared between hosts. The launcher and one host share the first namespace. In each run workers are killed,
stopped and sent away, one host is stopped for 5 s, the cable of another is cut for 5 s, one host gets SIGTERM and
leaves, and at last one is killed. Recovery is the time from the fault until the others have made a step without the
lost process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from main import table

import polytempo as pt
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic
from polytempo.runs.run_collective import run_collective
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

WORKERS, MOST, SILENT_S = 4, 6, 5.0
JOB = """
import os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from main import slow
import polytempo as pt

digits = pt.jobs.find("digits")
folder = Path(__file__).parent

def data(path):
    if "POLYTEMPO_RANK" in os.environ:
        (folder / ("pid-" + os.environ["POLYTEMPO_RANK"])).write_text(str(os.getpid()))
    return digits.data(path)

from dataclasses import replace
job = replace(slow(digits, folder / "over"), data=data, name="digits")
"""


class HostStorm:
    """One run's faults, drawn from a seed; each begins when the one before it has been recovered from."""

    def __init__(self, seed: int, folder: Path, namespaces: Sequence[str], worker_faults: int) -> None:
        self._folder, self._namespaces, plan = folder, namespaces, random.Random(seed)
        self._random = plan
        faults = plan.choices(
            ["SIGKILL of a worker"] * 4 + ["SIGSTOP of a worker", "SIGTERM of a worker"], k=worker_faults
        )
        hosts = plan.sample(range(1, len(namespaces)), len(namespaces) - 1)
        self._plan: list[tuple[str, int]] = [(what, -1) for what in faults]
        self._plan += [("host stopped for 5 s", hosts[0]), ("cable cut for 5 s", hosts[1])]
        plan.shuffle(self._plan)
        self._plan += [("SIGTERM of a host", hosts[2]), ("SIGKILL of a host", hosts[0])]
        self.seconds: list[tuple[str, float]] = []
        self._agents: list[int] = []
        self._plot: Iterator[None] | None = None

    def watch(self, launcher: ElasticLauncher) -> None:
        """Go on with the story, as often as the launcher looks for news."""
        self._plot = self._plot or self._story(launcher)
        next(self._plot, None)

    def _story(self, launcher: ElasticLauncher) -> Iterator[None]:
        self._agents = agents()
        for what, host in self._plan:
            yield from self._calm(launcher, self._random.uniform(0.1, 0.5))
            begun_s = time.monotonic()
            undo = self._harm_worker(launcher, what) if host < 0 else self._harm_host(launcher, what, host)
            while not undo[1]() or not launcher.is_training:
                yield
            self.seconds.append((what, time.monotonic() - begun_s))
            if undo[0] is not None:
                while time.monotonic() < begun_s + SILENT_S:
                    yield
                undo[0]()
                yield from self._calm(launcher, 2.0)
        (self._folder / "over").touch()

    def _calm(self, launcher: ElasticLauncher, seconds: float) -> Iterator[None]:
        """Until so many seconds have passed with four workers that train."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s or not launcher.is_training or len(self._members(launcher)) < WORKERS:
            yield

    def _members(self, launcher: ElasticLauncher) -> tuple[int, ...]:
        return () if launcher.view is None else launcher.view.members

    def _harm_worker(self, launcher: ElasticLauncher, what: str) -> tuple[Any, Any]:
        life = self._random.choice(self._members(launcher))
        os.kill(self._pid(launcher, life), getattr(signal, what.split()[0]))
        return None, lambda: life not in self._members(launcher)

    def _harm_host(self, launcher: ElasticLauncher, what: str, host: int) -> tuple[Any, Any]:
        there = frozenset(life for life in launcher.processes if self._host(launcher, life) == host)
        agent = self._agents[host]
        undo = None
        if what.startswith("cable"):
            self.cable(host, "down")
            undo = lambda: self.cable(host, "up")  # noqa: E731
        elif "stopped" in what:
            pids = [agent, *descendants(agent)]
            self._signal(pids, signal.SIGSTOP)
            undo = lambda: self._signal(pids, signal.SIGCONT)  # noqa: E731
        else:
            os.kill(agent, getattr(signal, what.split()[0]))
        return undo, lambda: not there & set(self._members(launcher))

    def cable(self, host: int, state: str) -> None:
        """Cut it, or mend it."""
        subprocess.run(["ip", "-n", self._namespaces[host], "link", "set", "eth0", state], check=True)

    @staticmethod
    def _signal(pids: list[int], number: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    @staticmethod
    def _host(launcher: ElasticLauncher, life: int) -> int:
        process: Any = launcher.processes[life]
        return -1 if process.agent is None or process.exit_code is not None else int(process.agent.number)

    def _pid(self, launcher: ElasticLauncher, life: int) -> int:
        """The process's PID in this PID namespace."""
        inner = (self._folder / f"pid-{life}").read_text()
        for pid in descendants(self._agents[self._host(launcher, life)]):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == inner:
                return pid
        raise AssertionError(f"process {life} is not there")


def descendants(process: int) -> list[int]:
    """All processes below one."""
    direct = [
        int(child)
        for task in Path(f"/proc/{process}/task").glob("*")
        for child in (task / "children").read_text().split()
    ]
    return [*direct, *(each for child in direct for each in descendants(child))]


def agents() -> list[int]:
    """The agents of this run, in the order of their starts."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]
            above = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if b"polytempo.agent" in words and words[0].endswith(b"python") and b"unshare" in above:
            found.append((int(parent), pid))
    return [pid for _, pid in sorted(found)]


def story(seed: int, given: argparse.Namespace, options: RunOptions, strategy: pt.Strategy) -> tuple[HostStorm, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "own.py").write_text(JOB.format(here=str(Path(__file__).parent)))
        job = pt.jobs.find(f"{folder}/own.py:job")
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "POLYTEMPO_DATA") if name in os.environ}
        engine = pt.engines.ssh(
            hosts=given.namespaces,
            command=["ip", "netns", "exec", "{host}", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
            python=sys.executable,
            address=given.address,
            environment=kept,
        )
        storm = HostStorm(seed, folder, given.namespaces, given.worker_faults)
        try:
            result = run_elastic(RunSpec.of(job, strategy, WORKERS, options), engine, None, None, storm.watch)
        finally:
            for host in range(1, len(given.namespaces)):
                storm.cable(host, "up")
    return storm, result


def main() -> None:
    """Run, and print the page's numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", nargs=4, required=True)
    parser.add_argument("--address", required=True, help="of the first one")
    parser.add_argument("--strategy", default="sync_sgd(route=invariant)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--worker-faults", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    strategy = pt.parse_strategy(given.strategy)
    options = RunOptions(epochs=given.epochs, global_batch_size=96, seed=3, threads=1)
    calm = run_collective(RunSpec.of(pt.jobs.find("digits"), strategy, WORKERS, options), pt.engines.local())
    more = {"min_workers": 1, "max_workers": MOST, "restarts": 10_000}
    elastic = RunOptions(epochs=given.epochs, global_batch_size=96, seed=3, threads=1, **more)
    seconds: list[tuple[str, float]] = []
    for seed in range(given.seed, given.seed + given.runs):
        storm, result = story(seed, given, elastic, strategy)
        seconds += storm.seconds
        assert result.ledger == calm.ledger, result.ledger
        equal = "equal" if result.parameters_sha256 == calm.parameters_sha256 else "NOT equal"
        groups = len(result.membership or [])
        print(
            f"seed {seed}: {len(storm.seconds)} faults, {groups} groups, accuracy {result.accuracy:.4f} (calm "
            f"{calm.accuracy:.4f}), weights {equal} to the calm run's, each sample of {given.epochs} epochs once",
            flush=True,
        )
    table(seconds)


if __name__ == "__main__":
    main()
