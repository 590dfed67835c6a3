"""Digits in a loop of one's own under torchrun, its parameters at a server: as accurate as `pt.run`, each sample once.

Ranks that are killed, by torchrun and without a launcher: the others' errors, and that nothing is left.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import polytempo as pt

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop_served.py"
STRATEGIES = ["downpour(shards=2,replicas=1,lr=0.02)", "async_sgd()", "ssp(bound=2)", "easgd(period=4)"]
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LONG_S = 240.0
EPOCHS = 12
"""More than the example's: later runs with workers in different turns are nearer to each other."""
LR = 0.05
LOOP = """
import os, signal, sys, torch
import polytempo as pt
from torch import nn

world = pt.init(quiet=True, timeout_s=60)
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
handle = pt.attach(model, optimizer, pt.strategies.async_sgd(shards=2, replicas=1))
for images, labels in pt.shard(digits.train, batch_size=16):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if handle.step == 10 and world.rank == int(sys.argv[1]):
        if sys.argv[2] == "raise":
            raise ValueError("the loop's own mistake")
        os.kill(os.getpid(), signal.SIGKILL)
handle.detach()
print(f"rank {world.rank}: {handle.account and handle.account['ledger']}")
"""

SAVING_LOOP = """
import os, signal, sys, torch
from pathlib import Path
import polytempo as pt
from torch import nn

folder, saves = Path(sys.argv[1]), sys.argv[2] == "saves"
world = pt.init(quiet=True, timeout_s=60, servers=int(sys.argv[3]))
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = pt.shard(digits.train, batch_size=32)
if (folder / "saved").exists():
    saved = torch.load(folder / "saved", weights_only=True)
    model.load_state_dict(saved["model"])
    batches.load_state_dict(saved["batches"])
first = batches.epoch
handle = pt.attach(model, optimizer, pt.strategies.async_sgd(shards=2))
while batches.epoch < 4:
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if batches.epoch == 2 and world.rank == 1 and not (folder / "died").exists():
            if saves:
                (folder / "epoch 2 is saved").read_text()  # a pipe
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if saves and world.rank == 0:
        with handle.consensus():
            torch.save({"model": model.state_dict(), "batches": batches.state_dict()}, folder / "saving")
        (folder / "saving").replace(folder / "saved")
        if batches.epoch == 2:
            (folder / "epoch 2 is saved").write_text("yes")
            signal.pause()  # until torchrun ends this rank, as rank 1 has died
handle.detach()
print(f"rank {world.rank} from epoch {first}: {handle.account and handle.account['ledger']}")
"""


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}


def torchrun(workers: int, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return subprocess.run(
        [*command, *arguments],
        env=environment(tmp_path),
        text=True,
        capture_output=True,
        timeout=LONG_S,
        check=False,
    )


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.glob("polytempo-*")]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_digits_are_learnt_as_well_as_by_run(strategy: str, workers: int, tmp_path: Path) -> None:
    example, number = re.subn(r"^EPOCHS = \d+$", f"EPOCHS = {EPOCHS}", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert number == 1
    (tmp_path / "loop.py").write_text(example)
    done = torchrun(workers, tmp_path, str(tmp_path / "loop.py"), strategy)
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+)% of the test digits, (\d) worker", done.stdout)
    ledger = re.search(r"samples: (\[.*\]);", done.stdout)
    assert found is not None
    assert ledger is not None
    (row,) = ast.literal_eval(ledger[1])
    assert (row["last_epoch"], row["twice"], row["never"]) == (EPOCHS - 1, 0, 0)
    job = pt.jobs.find("digits")
    by_run = pt.run(job, pt.parse_strategy(strategy), workers, epochs=EPOCHS, lr=LR, batch_size=32, threads=1)
    print(json.dumps({"strategy": strategy, "workers": workers, "own": float(found[1]), "run": by_run.accuracy}))
    assert by_run.accuracy is not None
    assert float(found[1]) >= 100 * by_run.accuracy - 1.0
    assert left(tmp_path) == []


def test_processes_of_torchrun_serve(tmp_path: Path) -> None:
    done = torchrun(4, tmp_path, str(EXAMPLE), "--servers", "2")
    assert done.returncode == 0, done.stderr
    assert "2 worker(s)" in done.stdout
    assert "2 ranks on 1 host, and 2 of the launcher's processes serve" in done.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_ends_all_and_nothing_is_left(rank: int, how: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = torchrun(2, tmp_path, str(tmp_path / "loop.py"), str(rank), how)
    assert done.returncode != 0
    assert ("the loop's own mistake" if how == "raise" else "SIGKILL") in done.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(("saves", "first"), [("saves", 2), ("does not save", 0)])
def test_torchrun_starts_all_again_and_the_loop_goes_on_from_what_it_has_saved(
    saves: str, first: int, servers: int, tmp_path: Path
) -> None:
    """Ranks that serve start again, too; they hold the state of no run before."""
    (tmp_path / "loop.py").write_text(SAVING_LOOP)
    os.mkfifo(tmp_path / "epoch 2 is saved")
    loop = [str(tmp_path / "loop.py"), str(tmp_path), saves, str(servers)]
    done = torchrun(2 + servers, tmp_path, "--max-restarts", "1", *loop)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank 0 from epoch (\d): (.*)", done.stdout)
    assert [int(epoch) for epoch, _ in found] == [first]  # the first start has not come to its end
    (row,) = ast.literal_eval(found[0][1])
    assert (row["last_epoch"] - row["first_epoch"] + 1, row["once"], row["twice"], row["never"]) == (
        4 - first,
        1437,
        0,
        0,
    )
    assert left(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_launcher_the_others_go_on_or_hear_why_not(rank: int, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(tmp_path / "loop.py"), str(rank), "kill"]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(tmp_path) | where | {"RANK": str(each), "LOCAL_RANK": str(each)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for each in range(2)
    ]
    outputs = [process.communicate(timeout=LONG_S) for process in ranks]
    assert ranks[rank].returncode == -signal.SIGKILL
    out, error = outputs[1 - rank]
    if rank == 1:
        (row,) = ast.literal_eval(out.partition(": ")[2])
        assert (row["once"], row["twice"], row["never"]) == (1437, 0, 0)
        assert "rank 1 has ended; its batches go to the others" in error
    else:
        assert "the parameter server" in error
        assert "rank 0 was killed" in error
    assert left(tmp_path) == []
