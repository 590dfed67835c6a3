"""Faults of a run with a parameter server on four hosts: processes, whole hosts and cables. How soon does it go on?

    python benchmarks/parameter_server/host_faults.py --namespaces h0 h1 h2 h3 --address 10.0.0.1 \\
        --plan processes hosts lost launcher resumed [--runs 5] [--seed 1]

Run it as root in the first of four network namespaces. The launcher is on host 0. The faults of each plan:

    processes  2 workers, heads and tails each killed, stopped for ever, and stopped for 5 s
    hosts      hosts 1 to 3 each stopped for 5 s, and cut off for 5 s
    lost       hosts 1 to 3, one after the other: killed, stopped for ever, and cut off for ever
    launcher   the launcher is stopped for 5 s three times, and its host is cut off for 5 s three times
    resumed    the launcher is killed, stopped for ever or cut off for ever; then the run is resumed

Every ticket must count exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from harm import SHARDS, WORKERS, Fault, Recovery, Watching, counted, running, wrong_with

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.engines.remote.remote_engine import RemoteProcess
from polytempo.runs.served import run_served, served_program
from polytempo.runs.served.lost_launcher import number_after
from polytempo.server.message import Outbox
from polytempo.server.snapshots.snapshot import complete
from polytempo.server.timing import Timing

TICKETS, STEP_S = 400, 0.1
PAUSE_S, LIMIT_S = 5.0, 5.0
LOST_S = 2.0
"""A stopped worker is given up after it, instead of half a minute."""
GONE_S = 60.0
EPOCHS, RESUMED_EPOCHS = {"processes": 9}, 2
"""The epochs of each plan; 4 without an entry."""
TICKETS_PER_FAULT = 20
"""The mean number of tickets between a recovery and the next fault at the earliest."""
KILL, STOP, PAUSE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
CUT, CUT_FOREVER = signal.SIGUSR1, signal.SIGUSR2
"""Signals stand for cuts. PAUSE: SIGSTOP, and SIGCONT after PAUSE_S. CUT: no cable for so long."""
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
    hurry = os.path.exists(os.path.join(os.path.dirname(__file__), "hurry"))  # all faults are over
    time.sleep(0.0 if hurry else {STEP_S})
    return output.mean()

job = pt.Job(model=partial(Counts, {TICKETS}), data=data, loss=loss,
             optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=1.0), batch_size=1, name="counting")
"""
PLANS = ["processes", "hosts", "lost", "launcher", "resumed"]
Namespaces = Sequence[str]


def strategy() -> pt.Strategy:
    """Two shards of two copies."""
    return pt.strategies.async_sgd(shards=SHARDS, replicas=1, rate=1.0)


def engine(namespaces: Namespaces, address: str) -> Any:
    """An agent in each namespace, behind a shell: like an agent behind ssh, no signal of the launcher's reaches it."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
    command = ["sh", "-c", '"$@"; :', "sh", "ip", "netns", "exec", "{host}"]
    return pt.engines.ssh(
        hosts=list(namespaces), command=command, python=sys.executable, address=address, environment=kept
    )


class OnHosts(Watching):
    """Does harm to processes of any host, and to hosts."""

    folder: Path
    namespaces: Namespaces
    _under_way = ""
    """The self-ending fault under way."""
    _hurries = False

    def __init__(self, *more: Any) -> None:
        super().__init__(*more)
        self.held = list[int]()
        """Processes of hosts that were stopped for ever; no signal of another host ends them."""

    def process(self, node: int) -> int | None:
        """The process on `node`, as it has written it down itself."""
        found = self.supervisor.process_on(node)
        path = self.folder / f"pid-{-1 if found is None else found.role.life}"
        return int(path.read_text() or 0) or None if path.exists() else None

    def strike(self, fault: Fault) -> None:
        """Do the harm; a victim that is just being replaced is struck when it is there."""
        if fault.what == "launcher":
            self.recoveries.append(Recovery(fault, -1, -1, -1, 0, self.dealt))
            self._harm([os.getpid()], self.namespaces[0], fault.signal)
        elif fault.what == "host":
            there, fault = self._on_a_host(fault)
            pids = [pid for each in there if (pid := self.process(each.role.node))]
            node = next((each.role.node for each in there if each.role.kind == "copy"), there[0].role.node)
            self.recoveries.append(Recovery(fault, node, node, self.process(node) or 0, 0, self.dealt))
            agent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(") ")[2].split()[1])
            self._harm([agent, *pids], self.namespaces[fault.which], fault.signal)
        else:
            node = fault.which
            if fault.what != "worker":
                node = self.run.coordinator.chains[fault.which][0 if fault.what == "head" else -1]
            process = self.process(node)
            assert process is not None, f"{fault}: it does not run"
            self.recoveries.append(Recovery(fault, node, node, process, self._lives.get(node, 0), self.dealt))
            self._harm([process], "", fault.signal)

    def tick(self, now_s: float) -> Outbox:
        """Tick as before; when all faults are over, the run hurries to its end."""
        if not self._faults and self._goes_on and not self._hurries:
            self._hurries = True
            (self.folder / "hurry").touch()
        return super().tick(now_s)

    def _harm(self, pids: Sequence[int], namespace: str, kind: signal.Signals) -> None:
        words = " ".join(map(str, pids))
        if kind == PAUSE:  # by another process, for this one may be the stopped one
            script = f"kill -STOP {words}; sleep {PAUSE_S}; kill -CONT {words} 2> /dev/null"
            self._ends_by_itself(subprocess.Popen(["sh", "-c", script]))
        elif kind == CUT:
            script = f"ip -n {namespace} link set eth0 down; sleep {PAUSE_S}; ip -n {namespace} link set eth0 up"
            self._ends_by_itself(subprocess.Popen(["sh", "-c", script]))
        elif kind == CUT_FOREVER:
            cable(namespace, "down")
        else:
            for pid in pids:
                os.kill(pid, kind)
            if namespace and kind == STOP:
                self.held += pids

    def _ends_by_itself(self, process: subprocess.Popen[bytes]) -> None:
        def waited() -> None:
            process.wait()
            self._under_way = ""

        self._under_way = str(process.pid)
        threading.Thread(target=waited, daemon=True).start()

    def _on_a_host(self, fault: Fault) -> tuple[list[RemoteProcess], Fault]:
        """The processes on the host that is to be struck; the next host where that one has lost all of its own."""
        for turn in range(3):
            host = (fault.which - 1 + turn) % 3 + 1
            there = [each for each in self._processes if each.agent is not None and each.agent.host == host]
            if there:
                return there, fault._replace(which=host)
        raise AssertionError("no process is on hosts 1 to 3")

    @property
    def is_whole(self) -> bool:
        """True if it is whole as before, and self-ending faults have ended."""
        return super().is_whole and not self._under_way

    @property
    def _processes(self) -> list[RemoteProcess]:
        found = [self.supervisor.process_on(role.node) for role in self.supervisor.running]
        return [each for each in found if isinstance(each, RemoteProcess)]


def cable(namespace: str, state: str) -> None:
    """Cut or mend the cable of a host."""
    subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", state], check=True)


def planned(plan: str, seed: int) -> list[tuple[str, int, signal.Signals]]:
    """The faults of a run, in a random order."""
    dice = random.Random(seed)
    if plan == "processes":
        victims = [("worker", w) for w in dice.sample(range(WORKERS), 2)]
        victims += [(copy, shard) for copy in ("head", "tail") for shard in range(SHARDS)]
        faults = [(what, which, kind) for what, which in victims for kind in (KILL, STOP, PAUSE)]
    elif plan == "hosts":
        faults = [("host", host, kind) for host in (1, 2, 3) for kind in (CUT, PAUSE)]
    elif plan == "lost":
        faults = list(zip(3 * ["host"], (1, 2, 3), dice.sample((KILL, STOP, CUT_FOREVER), 3), strict=True))
    else:
        faults = [("launcher", 0, kind) for kind in 3 * (CUT, PAUSE)]
    return dice.sample(faults, len(faults))


def story(plan: str, seed: int, namespaces: Namespaces, address: str) -> tuple[list[Recovery], list[str]]:
    """A run with faults, and the errors afterwards."""
    faults, dice, launchers = planned(plan, seed), random.Random(seed), list[OnHosts]()
    points = sorted(dice.randrange(TICKETS_PER_FAULT * len(faults)) for _ in faults)
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
                    epochs=EPOCHS.get(plan, 4),
                    threads=1,
                    restarts=100,
                    engine=engine(namespaces, address),
                )
        finally:
            for namespace in namespaces:
                cable(namespace, "up")
        for pid in launchers[0].held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wrong = wrong_with(result, launchers[0]) + left_in(folder)
    return launchers[0].recoveries, [f"{plan}, seed {seed}: {line}" for line in wrong]


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
from host_faults import RESUMED_EPOCHS, WORKERS, engine, strategy
folder, address, *namespaces = sys.argv[1:]
pt.run(pt.jobs.find(f"{folder}/own.py:job"), strategy(), WORKERS, epochs=RESUMED_EPOCHS, threads=1, out=f"{folder}/run",
       engine=engine(namespaces, address), restarts=20)
"""


def resumed(seed: int, namespaces: Namespaces, address: str) -> tuple[signal.Signals, float, list[str]]:
    """Harm a launcher at a random moment, and resume its run: (way, seconds until all is gone, errors).

    A launcher on a cut-off host goes on alone if that host holds a copy of each shard; its run comes to its end.
    """
    dice, kind = random.Random(seed), (KILL, STOP, CUT_FOREVER)[seed % 3]
    wrong = list[str]()
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, {"TMPDIR": name}):
        folder = Path(name)
        (folder / "own.py").write_text(JOB)
        with (folder / "log").open("w") as log:
            launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, name, address, *namespaces], stderr=log)
        rows = folder / "run" / "metrics.jsonl"
        while not rows.exists() or not rows.read_text():
            assert launcher.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        time.sleep(5.0 * dice.random())
        since_s = time.monotonic()
        if kind == CUT_FOREVER:
            cable(namespaces[0], "down")
            time.sleep(1.0)
            (folder / "hurry").touch()
            launcher.wait()
        else:
            launcher.send_signal(kind)
        while running(pids_in(folder)) and time.monotonic() - since_s < GONE_S:
            time.sleep(0.1)
        gone_s = time.monotonic() - since_s
        cable(namespaces[0], "up")
        launcher.kill()
        code = launcher.wait()
        wrong += left_in(folder)
        if code:
            if not complete(folder / "run" / "checkpoint", number_after(0), SHARDS):
                lines = (folder / "log").read_text().splitlines()
                return kind, gone_s, [f"launcher {seed}: not all shards have saved; its last words: {lines[-1:]}"]
            (folder / "hurry").touch()
            job = pt.jobs.find(f"{folder}/own.py:job")
            more = {"epochs": RESUMED_EPOCHS, "threads": 1, "out": folder / "run", "restarts": 20}
            result = pt.run(job, strategy(), WORKERS, resume=True, **more)
            if result.parameters_sha256 != counted(TICKETS, RESUMED_EPOCHS):
                wrong.append("the weights do not count each ticket once")
        elif counted(TICKETS, RESUMED_EPOCHS) not in (folder / "run" / "result.json").read_text():
            wrong.append("alone, the weights do not count each ticket once")
    ended = "ended well" if not code else f"ended with {code}"
    print(f"resumed, seed {seed}: {kind.name}, gone after {gone_s:.1f} s, the launcher {ended}", *wrong, flush=True)
    return kind, gone_s, [f"launcher {seed}: {line}" for line in wrong]


def pids_in(folder: Path) -> set[int]:
    """The processes of the run, as they have written themselves down."""
    return {int(path.read_text() or 0) for path in folder.glob("pid-*")}


NAMES = {
    KILL: "SIGKILL of a",
    STOP: "SIGSTOP of a",
    PAUSE: f"SIGSTOP for {PAUSE_S:.0f} s of a",
    CUT: f"cable cut for {PAUSE_S:.0f} s,",
    CUT_FOREVER: "cable cut for ever,",
}


def back_s(fault: Fault) -> float:
    """The return of a victim that is not replaced: the launcher has no copy."""
    return PAUSE_S if fault.what == "launcher" else 0.0


def table(recoveries: Sequence[Recovery]) -> tuple[list[Sequence[str]], list[str]]:
    """The rows of all kinds of faults, and the rows that miss the limit."""
    rows, wrong = list[Sequence[str]](), list[str]()
    for kind in sorted({(recovery.fault.signal, recovery.fault.what) for recovery in recoveries}):
        these = [r for r in recoveries if (r.fault.signal, r.fault.what) == kind]
        needed = sorted(r.needed_s - back_s(r.fault) for r in these if r.needed_s is not None)
        whole = sorted(r.whole_s for r in these if r.whole_s is not None)
        figures = [quantile(needed, 0.5), quantile(needed, 0.95), needed[-1]] if needed else []
        figures += [quantile(whole, 0.5), whole[-1]] if whole else []
        rows.append([f"{NAMES[kind[0]]} {kind[1]}", str(len(these)), *(f"{seconds:.2f}" for seconds in figures)])
        if needed and figures[1] > LIMIT_S:
            wrong.append(f"{NAMES[kind[0]]} {kind[1]}: 95 % take up to {figures[1]:.2f} s")
    return rows, wrong


def main() -> None:
    """Print the table; exit with 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", nargs="+", required=True)
    parser.add_argument("--address", required=True, help="of the first one")
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:1], *filter(None, [os.environ.get("PYTHONPATH")])])
    recoveries, wrong, gone = list[Recovery](), list[str](), dict[signal.Signals, list[float]]()
    for plan, seed in itertools.product(options.plan, range(options.seed, options.seed + options.runs)):
        if plan == "resumed":
            kind, gone_s, lines = resumed(seed, options.namespaces, options.address)
            gone.setdefault(kind, []).append(gone_s)
        else:
            since_s = time.monotonic()
            found, lines = story(plan, seed, options.namespaces, options.address)
            recoveries += found
            done = f"{len(found)} faults in {time.monotonic() - since_s:.0f} s"
            print(f"{plan}, seed {seed}: {done}", *lines, sep="\n  ", flush=True)
            for each in found:
                fault = each.fault
                print(f"    {fault.signal.name} {fault.what} {fault.which}: {each.needed_s} {each.whole_s}", flush=True)
        wrong += lines
    rows, late = table(recoveries)
    wrong += late
    if rows:
        print(markdown((HEADERS, rows)))
    for kind, seconds in sorted(gone.items()):
        print(
            f"{NAMES[kind]} launcher, {len(seconds)} times: all of the run is gone after at most {max(seconds):.1f} s"
        )
    print("\n".join(["wrong:", *wrong]) if wrong else "nothing lost, nothing twice, nothing left")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
