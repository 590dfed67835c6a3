"""A parameter server over agents that share no memory: the ways between them, and the loss of their launcher.

Two agents stand for two hosts: the processes of one share memory, and reach the other's over encrypted TCP.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import polytempo as pt
from engines.batch_runs import awaited
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served.lost_launcher import number_after
from polytempo.server.snapshots.snapshot import complete
from polytempo.spec.result import parameters_sha256

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

TICKETS, EPOCHS, SHARDS, WORKERS = 120, 40, 2, 4
JOB = f"""
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import polytempo as pt
from engines.batch_runs import awaited

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros({TICKETS})), nn.Parameter(torch.zeros({TICKETS}))

    def forward(self, inputs):
        return inputs @ self.first + inputs @ self.second

samples = TensorDataset(torch.eye({TICKETS}), torch.zeros({TICKETS}))
job = pt.Job(
    model=Counts,
    data=lambda folder: pt.Data(samples, samples),
    loss=lambda output, target: output.mean(),
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=1.0),
    batch_size=1,
    name="counting",
)
"""
LAUNCHER = """
import sys
import polytempo as pt
from engines.batch_runs import awaited
from test_hosts import agents, strategy

folder, epochs, started_by = sys.argv[1], int(sys.argv[2]), sys.argv[3]
job = pt.jobs.find(f"{folder}/own.py:job")
pt.run(job, strategy(), 4, epochs=epochs, threads=1, out=f"{folder}/run", engine=agents(started_by),
       checkpoint_every=100_000)
"""


def strategy() -> pt.Strategy:
    return pt.strategies.async_sgd(shards=SHARDS, replicas=1, rate=1.0)


def agents(started_by: str) -> pt.engines.ssh:
    """Two agents on this host: children of the launcher, or of a shell that outlives it."""
    shell = ("sh", "-c", '"$@"; :', "sh") if started_by == "a shell" else ()
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
    return pt.engines.ssh(
        hosts=["a", "b"],
        command=[*shell, "env", "HOST_NAME={host}"],
        python=sys.executable,
        address="127.0.0.1",
        environment=kept,
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the job, and one for temporary files that must be empty at the end."""
    made = tmp_path_factory.mktemp("h")
    (made / "own.py").write_text(JOB)
    (made / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(made / "t"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    yield made
    assert list((made / "t").glob("polytempo-*")) == []


def counted(epochs: int) -> str:
    """The hash of the final weights after each ticket was used once in each epoch."""
    return parameters_sha256(torch.full((TICKETS,), -float(epochs)) for _ in range(2))


def test_each_ticket_counts_once_over_two_agents(folder: Path) -> None:
    result = pt.run(
        pt.jobs.find(f"{folder}/own.py:job"), strategy(), WORKERS, epochs=3, threads=1, engine=agents("the launcher")
    )
    assert result.parameters_sha256 == counted(3)
    assert result.server is not None
    assert result.server["updates"] == 3 * TICKETS


@pytest.mark.parametrize("started_by", ["the launcher", "a shell"])
def test_a_killed_launcher_ends_the_run_with_all_saved_that_was_acknowledged(started_by: str, folder: Path) -> None:
    run, batches = folder / "run", random.Random(started_by).randrange(200, 400)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder), str(EPOCHS), started_by])
    try:
        awaited(lambda: _samples_of(run) >= batches or launcher.poll() is not None, "the batches")
        assert launcher.poll() is None
    finally:
        launcher.kill()
        launcher.wait()
    acknowledged = _samples_of(run)
    awaited(lambda: not list((folder / "t").glob("polytempo-*")), "the agents' end")
    assert complete(run / "checkpoint", number_after(0), SHARDS)
    epochs = -(-acknowledged // TICKETS) + 2
    result = pt.run(
        pt.jobs.find(f"{folder}/own.py:job"), strategy(), WORKERS, epochs=epochs, resume=True, threads=1, out=run
    )
    assert result.parameters_sha256 == counted(epochs)
    assert result.samples == epochs * TICKETS


def _samples_of(run: Path) -> int:
    try:
        return max((row["samples"] for row in read_metrics(run)), default=0)
    except OSError:
        return 0
