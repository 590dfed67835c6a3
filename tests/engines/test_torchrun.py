"""Worlds of an elastic torchrun, with agents that come and go, are joined in every round."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engines.batch_runs import LONG_S, awaited, marked
from polytempo.engines.remote.network import address_to

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

ADDRESS = address_to("198.51.100.1")
"""This host's, on the way to a network that is none: the loopback address is refused where a world spans hosts."""
SCRIPT = """
import os, pathlib, sys, time
import torch
import polytempo as pt

folder = pathlib.Path(sys.argv[1])
world = pt.init(timeout_s=60, quiet=True)

async def total(port):
    return await port.all_reduce(torch.tensor([port.rank + 1.0]))

while not (folder / "stop").exists():
    summed = world.drive(total(world.port)).item()
    counted = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"rank-{os.getpid()}.tmp").write_text(f"{world.rank} {world.size} {summed:g} {counted}")
    os.replace(folder / f"rank-{os.getpid()}.tmp", folder / f"rank-{os.getpid()}")
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def mark() -> Iterator[str]:
    """A test's processes have ended after it."""
    with marked() as mark:
        yield mark


class Elastic:
    """One torchrun of `num_agents`, such as "1:2", each with one worker."""

    def __init__(self, folder: Path, num_agents: str) -> None:
        self.folder, self.num_agents, self.agents = folder, num_agents, list[subprocess.Popen[bytes]]()
        (folder / "script.py").write_text(SCRIPT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def join(self) -> subprocess.Popen[bytes]:
        """Another agent."""
        options = [
            *(f"--nnodes={self.num_agents}", "--nproc-per-node=1", "--max-restarts=5", "--monitor-interval=0.2"),
            *("--rdzv-backend=c10d", "--rdzv-id=story", f"--rdzv-endpoint=127.0.0.1:{self._port}"),
            *("--rdzv-conf=last_call_timeout=4", f"--local-addr={ADDRESS}"),
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "script.py", str(self.folder)]
        with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
            )
        return self.agents[-1]

    def is_open(self) -> bool:
        """True if an agent holds the store."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def workers(self) -> dict[int, list[str]]:
        """The record of each living process: rank, size, sum, count of restarts."""
        written = {int(path.name[5:]): path.read_text().split() for path in self.folder.glob("rank-*[0-9]")}
        return {process: words for process, words in written.items() if Path(f"/proc/{process}").exists()}

    def met(self, size: int, but: set[int]) -> dict[int, list[str]]:
        """The workers of a round of `size`, once all of them have summed over it; none is one of `but`."""

        def found() -> dict[int, list[str]]:
            if any(agent.poll() not in (None, -signal.SIGKILL) for agent in self.agents):
                raise AssertionError("\n".join(path.read_text() for path in self.folder.glob("agent-*.log")))
            living = self.workers()
            return living if len(living) == size and not but & living.keys() else {}

        living: dict[int, list[str]] = awaited(found, f"a round of {size}")
        assert sorted(words[:3] for words in living.values()) == [
            [str(rank), str(size), str(size * (size + 1) // 2)] for rank in range(size)
        ]
        return living

    def end(self) -> None:
        """Let all workers end, and their agents."""
        (self.folder / "stop").touch()
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(LONG_S / 10)
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
            agent.wait(LONG_S)


def test_agents_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of one round in step 4 were restarted by different counts.

    Agents share a store by default, and in torch 2.13 a later agent then waits in vain for that store's address
    (`DistStoreError` with the key MASTER_ADDR); with this variable of torch's each round has a store of its own.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run = Elastic(tmp_path, "1:2")
    try:
        first = run.join()  # 1. two agents; the first one holds the store for their meeting
        awaited(run.is_open, "the store")
        second = run.join()
        before = run.met(2, set())

        os.kill(max(before), signal.SIGKILL)  # 2. a worker is killed, and both start again
        after = run.met(2, set(before))

        second.kill()  # 3. an agent is killed with its worker, and the other one goes on alone
        [worker] = [each for each in after if parent(each) != first.pid]
        os.kill(worker, signal.SIGKILL)
        alone = run.met(1, set(after))

        run.join()  # 4. a new agent joins, which has counted no restart
        again = run.met(2, set(alone))
        assert len({words[3] for words in again.values()}) == 2
    finally:
        run.end()


def test_workers_that_start_again_in_a_store_that_holds_their_old_addresses(tmp_path: Path) -> None:
    run = Elastic(tmp_path, "2")
    try:
        run.join()
        run.join()
        before: set[int] = set()
        for _ in range(3):
            living = run.met(2, before)
            before |= set(living)
            os.kill(min(living), signal.SIGKILL)
        run.met(2, before)
    finally:
        run.end()


def parent(process: int) -> int:
    """The process id of its parent."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])
