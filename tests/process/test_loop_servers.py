"""Ranks that serve in a loop of one's own: real processes with the variables of a launcher that lets the others live."""

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
batches = pt.shard(data, batch_size=8)
for _ in range(2):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if world.rank == 0 and handle.step == 10 and victim >= 0:
            os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
handle.detach()
print(f"worker {world.rank} of {world.size}, {torch.distributed.get_world_size()}: {handle.account}")
"""
Ended = tuple[int, str, str]


def started(size: int, folder: Path, *arguments: str) -> list[Ended]:
    """How `size` processes end, and what they say, of which none is ended because another has failed."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "tmp").mkdir()
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
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "loop.py"), str(folder), *arguments],
            env=where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=LONG_S) for process in processes]
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
    lost = re.findall(r"shard-(\d)-node-\d+ was killed by SIGKILL", ended[0][2])
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
