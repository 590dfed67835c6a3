"""Two islands of two workers train digits, and a member, an island or the coordinator dies: torchft beside ours.

    pip install --no-deps torchft==0.2.0
    python benchmarks/elastic/islands.py

Workers average gradients in their island in each step, and models over both islands every five steps: `islands(outer=
local_sgd(5))`, and torchft's `LocalSGD` around all-reduces by gloo. A step lasts 10 ms at least. The table has the
workers that go on, and the seconds until the first of them has made five steps more. torchft's time limits are 10 s,
and its lighthouse waits 5 s for groups that are missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

ISLANDS = 2
FAULTS = {"a member": [0], "an island": [0, 1], "the coordinator": []}
PERIOD, STEP_S, WATCHED_S, LIMIT_S, JOIN_S, PATIENCE_S = 5, 0.01, 25.0, 10.0, 5.0, 60.0


def ours(folder: Path) -> None:
    """An elastic run of islands, without an end."""

    def watch(launcher: ElasticLauncher) -> None:
        if launcher.is_training and launcher.view is not None and not (folder / "members").exists():
            found: list[Any] = [launcher.processes[life] for life in launcher.view.members]
            told(folder, "members", " ".join(str(process.pid) for process in found))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad:
            time.sleep(STEP_S)
            told(folder, f"step-{os.getpid()}", str(time.time()))
        return job.loss(output, target)

    strategy = pt.strategies.islands(outer=pt.strategies.local_sgd(PERIOD))
    options = RunOptions(epochs=10_000, global_batch_size=96, min_workers=1, threads=1)
    run_elastic(RunSpec.of(replace(job, loss=loss), strategy, 4, options), pt.engines.local(), None, None, watch)


def torchft(folder: Path) -> None:
    """torchft's lighthouse, and its four workers."""
    from torchft.coordination import LighthouseServer

    milliseconds = {"join_timeout_ms": int(1000 * JOIN_S), "quorum_tick_ms": 100}
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **milliseconds)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    stores = [torch.distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) for _ in range(ISLANDS)]
    pids = []
    for island, store in enumerate(stores):
        for rank in range(2):
            arguments = [sys.executable, __file__, "--worker", str(island), str(rank), str(store.port), str(folder)]
            pids.append(str(subprocess.Popen(arguments).pid))
    told(folder, "members", " ".join(pids))
    time.sleep(3600)


def torchft_worker(island: int, rank: int, port: str, folder: Path) -> None:
    """One of them."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import LocalSGD

    limit = timedelta(seconds=LIMIT_S)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the parent's
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=limit)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        replica_id=f"island-{island}-",
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        **dict.fromkeys(("timeout", "quorum_timeout", "connect_timeout"), limit),
    )
    samples, labels = torch.randn(24, 64), torch.randint(0, 10, (24,))
    with LocalSGD(manager, model, optimizer, sync_every=PERIOD):
        while True:
            optimizer.zero_grad()
            job.loss(model(samples), labels).backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= 2
            time.sleep(STEP_S)
            told(folder, f"step-{os.getpid()}", str(time.time()))
            optimizer.step()


def told(folder: Path, name: str, line: str) -> None:
    """Append a line."""
    with (folder / name).open("a") as file:
        file.write(line + "\n")


def measured(side: str, dead: list[int]) -> tuple[int, float | None]:
    """Workers that go on after these members are killed (none: the coordinator), and seconds to five steps of one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = subprocess.Popen(
            [sys.executable, __file__, "--side", side, name], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            until_s = time.monotonic() + PATIENCE_S
            while not all(len(steps(folder, pid)) > 20 for pid in members(folder)) or not members(folder):
                if whole.poll() is not None or time.monotonic() > until_s:
                    sys.exit(f"{side} makes no steps; see `{sys.executable} {__file__} --side {side} {name}`")
                time.sleep(0.1)
            killed = [members(folder)[index] for index in dead] or [whole.pid]
            at_s = time.time()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            time.sleep(WATCHED_S)
            after = {pid: [s for s in steps(folder, pid) if s > at_s] for pid in members(folder) if pid not in killed}
            lively = [found[PERIOD] - at_s for found in after.values() if len(found) > 2 * PERIOD]
            return len(lively), min(lively, default=None)
        finally:
            for pid in members(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(whole.pid, signal.SIGKILL)
            whole.wait()


def members(folder: Path) -> list[int]:
    """The workers' processes, in the order of their islands."""
    file = folder / "members"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def steps(folder: Path, pid: int) -> list[float]:
    """The times of a worker's steps."""
    file = folder / f"step-{pid}"
    return [float(line) for line in file.read_text().split()] if file.exists() else []


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=["ours", "torchft"], default=["ours", "torchft"])
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        torchft_worker(int(given.worker[0]), int(given.worker[1]), given.worker[2], Path(given.worker[3]))
    elif given.side:
        (ours if given.side[0] == "ours" else torchft)(Path(given.side[1]))
    else:
        for fault, dead in FAULTS.items():
            for side in given.only:
                lively, seconds = measured(side, dead)
                when = "-" if seconds is None else f"{seconds:.2f} s"
                print(f"{fault} dies: {side:8} {lively} of {4 - len(dead)} go on, {when}", flush=True)


if __name__ == "__main__":
    main()
