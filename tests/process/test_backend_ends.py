"""The backend "polytempo": begin, meetings and end of groups, and the remains of a process that does not leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from polytempo.engines.processes.worker import RankInfo, Result
from process.backend_group import begin, run
from shared_memory import segments

pytestmark = pytest.mark.process


def test_a_monitored_barrier_names_who_is_missing() -> None:
    def work(rank_info: RankInfo) -> Result:
        group: Any = dist.new_group()
        dist.monitored_barrier()
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        dist.monitored_barrier(group)
        answer = ""
        if rank_info.rank != 1:
            try:
                dist.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=True)
            except RuntimeError as error:
                answer = str(error)
        dist.barrier()
        return answer

    answers = run(3, work)
    for rank in (0, 2):
        assert "timed out" in answers[rank]
        assert "Rank 1 failed to pass monitoredBarrier in 300 ms" in answers[rank]


def test_a_second_group_begins_where_the_first_was_destroyed() -> None:
    def work(rank_info: RankInfo) -> Result:
        found = []
        for turn in range(3):
            dist.destroy_process_group()
            begin(rank_info, f"again-{turn}")
            tensor = torch.tensor([float(turn + rank_info.rank)])
            dist.all_reduce(tensor)
            found.append(float(tensor))
        return found

    assert run(2, work) == [[1, 3, 5]] * 2


def test_data_loaders_fork_after_the_group_is_there() -> None:
    def work(rank_info: RankInfo) -> Result:
        total = torch.zeros(1)
        for _ in range(2):
            for part in DataLoader(torch.arange(40.0), batch_size=10, num_workers=2):  # type: ignore[arg-type]
                part_sum = part.sum().reshape(1)
                each = dist.all_reduce(part_sum, async_op=True)
                each.wait()
                total += part_sum
        return float(total)

    assert run(2, work) == [2 * 2 * 780] * 2


LEAVING = """
import os, sys, tempfile, warnings
from datetime import timedelta
warnings.simplefilter("error")
import torch
import torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)

def joined(rank, folder):
    limit = timedelta(seconds=20)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("polytempo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.all_reduce(torch.ones(100_000), async_op=True).wait()
    return dist.isend(torch.ones(2 << 20), 1) if rank == 0 else None

def leave(rank, how):
    if how == "a collective in flight":
        return dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
    if how == "a message in flight":
        return dist.irecv(torch.ones(5), 1 - rank, tag=7)
    if how == "an error":
        raise KeyError("on purpose")

for how in sys.stdin:  # each way in a process of its own, which ends as any interpreter does
    how, folder = how.strip(), tempfile.mkdtemp(dir=sys.argv[1])
    child = os.fork()
    if child == 0:
        for descriptor, name in enumerate(("out", "error"), 1):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), folder, flush=True)
else:
    sys.exit()
rank = 0 if os.fork() else 1
try:
    sent = joined(rank, folder)
    kept = leave(rank, how)
finally:
    if rank == 0:
        _, status = os.wait()
        print("other", os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """An interpreter that has loaded torch, and forks for each way to leave that it reads."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path_factory.mktemp("leaving"))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["nothing", "a collective in flight", "a message in flight", "an error"])
def test_who_ends_without_leaving_leaves_nothing_and_does_not_hang(how: str, leaving: subprocess.Popen[str]) -> None:
    assert leaving.stdin is not None
    assert leaving.stdout is not None
    before = segments()
    print(how, file=leaving.stdin, flush=True)
    code, folder = leaving.stdout.readline().split()
    out, error = (Path(folder, name).read_text() for name in ("out", "error"))
    expected = 1 if how == "an error" else 0
    assert (int(code), out) == (expected, f"other {expected}\n"), error
    assert "Fatal" not in error
    assert error.count("KeyError: 'on purpose'") == 2 * expected
    assert segments() == before
