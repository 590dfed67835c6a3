"""Faults of a run with a parameter server on four hosts: processes, whole hosts and cables. How soon does it go on?

    python benchmarks/parameter_server/host_faults.py --namespaces h0 h1 h2 h3 --address 10.0.0.1 [--runs 5] [--seed 1]

Run it as root in the first of four network namespaces. In each run workers, heads and tails are killed and stopped,
cables of hosts 1 to 3 are cut for 5 s, and at the end one host is lost for ever: all its processes are killed, or
stopped, or its cable is cut. Then launchers are killed, and their runs resumed. Every ticket must count exactly once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from faults import HEADERS, quantile
from harm import SHARDS, WORKERS, Fault, Recovery, Watching, counted, wrong_with

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.engines.remote.remote_engine import RemoteProcess
from polytempo.runs.served import run_served, served_program
from polytempo.runs.served.lost_launcher import number_after
from polytempo.server.shard.snapshot import complete
from polytempo.server.timing import Timing

TICKETS, EPOCHS, LAST_POINT = 400, 10, 3000
CUT_S, LIMIT_S = 5.0, 5.0
LOST_S = 2.0
"""After which a stopped worker is given up, instead of half a minute."""
GONE_S = 30.0
CUT, CUT_FOREVER = signal.SIGUSR1, signal.SIGUSR2
"""Stand for what becomes of a cable."""
JOB = f"""
import os, time
from functools import partial
import torch
from torch.utils.data import TensorDataset
import polytempo as pt
from harm import Counts

def data(folder):
    if "POLYTEMPO_RANK" in os.environ:
        with open(os.path.join(os.path.dirname(__file__), "pid-" + os.environ["POLYTEMPO_RANK"]), "w") as file:
            file.write(str(os.getpid()))
    return pt.Data(TensorDataset(torch.eye({TICKETS}), torch.zeros({TICKETS})))

def loss(output, target):
    time.sleep(0.01)
    return output.mean()

job = pt.Job(model=partial(Counts, {TICKETS}), data=data, loss=loss,
             optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=1.0), batch_size=1, name="counting")
"""
Namespaces = Sequence[str]


def strategy() -> pt.Strategy:
    """Two shards of two copies."""
    return pt.strategies.async_sgd(shards=SHARDS, replicas=1, rate=1.0)


def engine(namespaces: Namespaces, address: str) -> Any:
    """An agent in each namespace."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
    command = ["ip", "netns", "exec", "{host}"]
    return pt.engines.ssh(
        hosts=list(namespaces), command=command, python=sys.executable, address=address, environment=kept
    )


class OnHosts(Watching):
    """Does harm to processes of any host, and to hosts."""

    folder: Path
    namespaces: Namespaces
    _down = ""

    def process(self, node: int) -> int | None:
        """The process on `node`, as it has written it down itself."""
        found = self.supervisor.process_on(node)
        path = self.folder / f"pid-{-1 if found is None else found.role.life}"
        return int(path.read_text() or 0) or None if path.exists() else None

    def strike(self, fault: Fault) -> None:
        """Do the harm; a victim that is just being replaced is struck when it is there."""
        if fault.what != "host":
            super().strike(fault)
            return
        there = [each for each in self._processes if each.agent is not None and each.agent.host == fault.which]
        pids = [pid for each in there if (pid := self.process(each.role.node))]
        node = next((each.role.node for each in there if each.role.kind == "copy"), there[0].role.node)
        self.recoveries.append(Recovery(fault, node, self.process(node) or 0, 0, self.dealt))
        if fault.signal in (CUT, CUT_FOREVER):
            self._cable(self.namespaces[fault.which], "down")
            if fault.signal == CUT:
                self._down = self.namespaces[fault.which]
                threading.Timer(CUT_S, self._restore).start()
            return
        agent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(") ")[2].split()[1])
        for pid in (agent, *pids):
            os.kill(pid, fault.signal)

    @property
    def is_whole(self) -> bool:
        """As before, and the cable is there again."""
        return super().is_whole and not self._down

    @property
    def _processes(self) -> list[RemoteProcess]:
        found = [self.supervisor.process_on(role.node) for role in self.supervisor.running]
        return [each for each in found if isinstance(each, RemoteProcess)]

    def _restore(self) -> None:
        self._cable(self._down, "up")
        self._down = ""

    @staticmethod
    def _cable(namespace: str, state: str) -> None:
        subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", state], check=True)


def story(seed: int, namespaces: Namespaces, address: str) -> tuple[list[Recovery], list[str]]:
    """A run with faults, and what is wrong afterwards."""
    plan, launchers = random.Random(seed), list[OnHosts]()
    victims = [("worker", w) for w in range(WORKERS)] + [(copy, s) for copy in ("head", "tail") for s in range(SHARDS)]
    faults = [(what, which, signal.SIGKILL) for what, which in plan.sample(victims, len(victims))]
    faults += [("worker", seed % WORKERS, signal.SIGSTOP), ("head", seed % SHARDS, signal.SIGSTOP)]
    faults += [("tail", seed % SHARDS, signal.SIGSTOP), *(("host", 1 + host, CUT) for host in range(3))]
    plan.shuffle(faults)
    faults.append(("host", 1 + (seed // 3 + seed) % 3, (signal.SIGKILL, signal.SIGSTOP, CUT_FOREVER)[seed % 3]))
    points = sorted(plan.randrange(LAST_POINT) for _ in faults)
    due = [Fault(point, *fault) for point, fault in zip(points, faults, strict=True)]
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, {"TMPDIR": name}):
        folder = Path(name)
        (folder / "own.py").write_text(JOB)

        def launched(run: Any, supervisor: Any) -> OnHosts:
            launchers.append(OnHosts(run, supervisor, due, seed))
            launchers[-1].folder, launchers[-1].namespaces = folder, namespaces
            return launchers[-1]

        try:
            with (
                patch.object(run_served, "Launcher", launched),
                patch.object(served_program, "Timing", lambda **more: Timing(worker_lost_s=LOST_S, **more)),
            ):
                result = pt.run(
                    *(pt.jobs.find(f"{folder}/own.py:job"), strategy(), WORKERS),
                    epochs=EPOCHS,
                    threads=1,
                    restarts=100,
                    engine=engine(namespaces, address),
                )
        finally:
            for namespace in namespaces:
                OnHosts._cable(namespace, "up")
        wrong = wrong_with(result, launchers[0]) + left_in(folder)
    return launchers[0].recoveries, [f"seed {seed}: {line}" for line in wrong]


def left_in(folder: Path) -> list[str]:
    """Processes of the run, and their private folders, that are there after a while."""
    until_s = time.monotonic() + GONE_S
    while True:
        pids = [int(path.read_text() or 0) for path in folder.glob("pid-*")]
        left = [f"process {pid} is there" for pid in pids if pid and os.path.exists(f"/proc/{pid}")]
        left += [f"{path} is there" for path in folder.glob("polytempo-*")]
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.1)


LAUNCHER = """
import os, sys
import polytempo as pt
from host_faults import EPOCHS, WORKERS, engine, strategy
folder, address, *namespaces = sys.argv[1:]
pt.run(pt.jobs.find(f"{folder}/own.py:job"), strategy(), WORKERS, epochs=EPOCHS, threads=1, out=f"{folder}/run",
       engine=engine(namespaces, address))
"""


def orphaned(seed: int, namespaces: Namespaces, address: str) -> tuple[float, list[str]]:
    """Kill a launcher at a random moment: seconds until all of the run is gone; and what is wrong after `resume`."""
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, {"TMPDIR": name}):
        folder = Path(name)
        (folder / "own.py").write_text(JOB)
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, name, address, *namespaces])
        rows = folder / "run" / "metrics.jsonl"
        while not rows.exists() or not rows.read_text():
            time.sleep(0.05)
        time.sleep(5.0 * random.Random(seed).random())
        launcher.kill()
        launcher.wait()
        since_s = time.monotonic()
        wrong = left_in(folder)
        gone_s = time.monotonic() - since_s
        if not complete(folder / "run" / "checkpoint", number_after(0), SHARDS):
            wrong.append("not all shards have saved")
        job = pt.jobs.find(f"{folder}/own.py:job")
        result = pt.run(
            job, strategy(), WORKERS, epochs=EPOCHS, resume=True, threads=1, out=folder / "run", restarts=20
        )
        if result.parameters_sha256 != counted(TICKETS, EPOCHS):
            wrong.append("the weights do not count each ticket once")
    return gone_s, [f"launcher {seed}: {line}" for line in wrong]


NAMES = {
    signal.SIGKILL: "SIGKILL of a",
    signal.SIGSTOP: "SIGSTOP of a",
    CUT: f"cable cut for {CUT_S:.0f} s,",
    CUT_FOREVER: "cable cut for ever,",
}


def main() -> None:
    """Print the table; exit with 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", nargs="+", required=True)
    parser.add_argument("--address", required=True, help="of the first one")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--launchers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recoveries, wrong = list[Recovery](), list[str]()
    for seed in range(options.seed, options.seed + options.runs):
        since_s = time.monotonic()
        found, lines = story(seed, options.namespaces, options.address)
        recoveries += found
        wrong += lines
        print(f"seed {seed}: {len(found)} faults in {time.monotonic() - since_s:.0f} s", *lines, sep="\n  ", flush=True)
    rows: list[Sequence[str]] = []
    for kind in sorted({(recovery.fault.signal, recovery.fault.what) for recovery in recoveries}):
        these = [r for r in recoveries if (r.fault.signal, r.fault.what) == kind]
        needed = sorted(r.needed_s for r in these if r.needed_s is not None)
        whole = sorted(r.whole_s for r in these if r.whole_s is not None)
        figures = [quantile(needed, 0.5), quantile(needed, 0.95), needed[-1]] if needed else []
        figures += [quantile(whole, 0.5), whole[-1]] if whole else []
        rows.append([f"{NAMES[kind[0]]} {kind[1]}", str(len(these)), *(f"{seconds:.2f}" for seconds in figures)])
        if needed and figures[1] > LIMIT_S:
            wrong.append(f"{NAMES[kind[0]]} {kind[1]}: 95 % take up to {figures[1]:.2f} s")
    print(markdown((HEADERS, rows)))
    gone = [orphaned(seed, options.namespaces, options.address) for seed in range(options.launchers)]
    wrong += [line for _, lines in gone for line in lines]
    if gone:
        print(
            f"\n{len(gone)} launchers killed: all of the run is gone after at most",
            f"{max(each for each, _ in gone):.1f} s",
        )
    print("\n".join(["wrong:", *wrong]) if wrong else "nothing lost, nothing twice, nothing left")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
