"""Ranks that serve in a loop of one's own: real processes, as under a launcher that lets the others live."""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

LONG_S = 120.0
SAMPLES = 480
LOOP = """
import os, signal, sys, torch
from pathlib import Path
import polytempo as pt
from torch import nn
from torch.utils.data import TensorDataset

folder, strategy, servers, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
world = pt.init(quiet=True, timeout_s=60, servers=servers)
torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randn(480, 2))
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
handle = pt.attach(model, optimizer, pt.parse_strategy(strategy))
COMES_BACK = -2

def come_back():
    # rank 1 dies in its fifth step, and rank 0 begins epoch 1 when rank 1 has made a step of it
    if world.rank == 1 and world.life == 1 and handle.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and world.life == 2 and handle.step == 1:
        (folder / "back").write_text("here")

batches = pt.shard(data, batch_size=8)
for epoch in range(2):
    if epoch == 1 and victim == COMES_BACK and world.rank == 0:
        (folder / "back").read_text()
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if world.rank == 0 and handle.step == 10 and victim >= 0:
            os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
            (folder / "killed").write_text("yes")
        if world.rank == 1 and handle.step == 5 and victim >= 0:
            (folder / "killed").read_text()  # a pipe: rank 1 leaves the rest of the run to what comes after
        if victim == COMES_BACK:
            come_back()
handle.detach()
size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
print(f"worker {world.rank} of {world.size}, {size}: {handle.account}; {handle.step} steps")
"""
Ended = tuple[int, str, str]


def started(size: int, folder: Path, *arguments: str, again: int | None = None) -> list[Ended]:
    """The ends and outputs of `size` processes; none is ended because another has failed.

    Rank `again` is started again when it has ended.
    """
    (folder / "loop.py").write_text(LOOP)
    (folder / "tmp").mkdir()
    os.mkfifo(folder / "killed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }

    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(folder / "loop.py"), str(folder), *arguments],
            env=where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    processes = [start(rank) for rank in range(size)]
    try:
        if again is not None:
            processes[again].communicate(timeout=LONG_S)
            processes[again] = start(again)
        said = [process.communicate(timeout=LONG_S) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise AssertionError([process.communicate() for process in processes]) from None
    return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def left(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").glob("polytempo-*")]


def ledger(said: str) -> tuple[int, int, int]:
    found = re.search(r"'ledger': (\[.*?\])", said)
    assert found is not None, said
    (row,) = ast.literal_eval(found[1])
    assert row["last_epoch"] == 1
    return row["once"], row["twice"], row["never"]


def test_two_servers_hold_the_shards_and_where_one_is_killed_the_other_goes_on(tmp_path: Path) -> None:
    ended = started(4, tmp_path, "async_sgd(shards=2, replicas=1)", "2", "3")
    assert [code for code, _, _ in ended] == [0, 0, 0, -signal.SIGKILL], ended
    assert "worker 0 of 2, 2" in ended[0][1]
    assert "worker 1 of 2, 2" in ended[1][1]
    assert ended[2][1] == ""  # it has served, and the loop behind pt.init is the workers'
    assert ledger(ended[0][1]) == (SAMPLES, 0, 0)
    lost = re.findall(r"shard-(\d)-node-\d+ (?:was killed by SIGKILL|ended with its agent)", ended[0][2])
    assert sorted(lost) == ["0", "1"]  # each shard had a copy on it
    assert left(tmp_path) == []


def test_without_a_copy_elsewhere_all_workers_hear_that_the_shard_is_lost(tmp_path: Path) -> None:
    ended = started(3, tmp_path, "async_sgd()", "1", "2")
    assert [code for code, _, _ in ended] == [1, 1, -signal.SIGKILL], ended
    for _, _, error in ended[:2]:
        assert re.search(r"PolytempoError: the parameter server has ended: .*shard 0", error), error
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("strategy", "servers", "problem"),
    [
        (
            "async_sgd(replicas=1)",
            "1",
            r"keeps 2 copies .* servers=1; give pt.init\(servers=2\) or more, or replicas=0",
        ),
        ("sync_sgd()", "1", "has no parameter server"),
    ],
)
def test_servers_of_no_use_are_refused_and_end_with_the_workers(
    strategy: str, servers: str, problem: str, tmp_path: Path
) -> None:
    ended = started(2, tmp_path, strategy, servers, "-1")
    assert [code for code, _, _ in ended] == [1, 0], ended
    assert re.search(f"ValueError: .*{problem}", ended[0][2]), ended[0][2]


@pytest.mark.parametrize(
    ("strategy", "servers"), [("async_sgd(shards=2)", 0), ("ssp(bound=2)", 0), ("async_sgd(shards=2, replicas=1)", 2)]
)
def test_a_worker_that_is_started_again_comes_back_into_the_run(strategy: str, servers: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "back")
    ended = started(2 + servers, tmp_path, strategy, str(servers), "-2", again=1)
    assert [code for code, _, _ in ended] == [0] * (2 + servers), ended
    assert ledger(ended[0][1]) == (SAMPLES, 0, 0)
    assert "worker 1 of 2, None: None" in ended[1][1]  # it is in no process group
    assert "rank 1 has ended; its batches go to the others" in ended[0][2]
    assert "rank 1 has come back; it takes part again" in ended[0][2]
    assert left(tmp_path) == []
