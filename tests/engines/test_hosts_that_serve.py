"""`pt.init(servers=N)` on two hosts, each a network namespace with a cable between them (needs root and iproute2)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from polytempo.wire.keys import make_keys, write_keys
from process.test_loop_servers import LOOP, SAMPLES, ledger, left

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop_served.py"
LONG_S = 240.0
PORT = 29_500
"""The port of the launcher's store; no other process has this network."""


class Hosts:
    """Two namespaces with their processes."""

    def __init__(self, name: str) -> None:
        self.names = [f"{name}{end}" for end in "ab"]
        self.processes: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        """10.0.0.1 and 10.0.0.2."""
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, name in enumerate(self.names, 1):
            ip("-n", name, "address", "add", f"10.0.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")

    def start(self, host: int, command: Sequence[str], folder: Path, more: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process of a launcher, or a launcher, on a host."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, *command],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder / "tmp"),
                "GLOO_SOCKET_IFNAME": "eth0",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": str(PORT),
                **more,
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def remove(self) -> None:
        """End the remaining processes, and the namespaces."""
        for process in self.processes:
            process.kill()
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "tmp").mkdir()
    found = Hosts(f"pt-{os.getpid()}-")
    try:
        found.connect()
        yield found
    finally:
        found.remove()


def keys_in(folder: Path) -> dict[str, str]:
    write_keys(folder / "keys", make_keys())
    return {"POLYTEMPO_KEYS": str(folder / "keys")}


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_last_process_of_each_host_serves_under_torchrun(has_keys: bool, hosts: Hosts, tmp_path: Path) -> None:
    """The line is encrypted. The keys travel with the gradients, and the user hears of it; or they are there."""
    more = keys_in(tmp_path) if has_keys else {}
    launchers = []
    for host in range(2):
        options = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={host}", "--master-addr=10.0.0.1"]
        torchrun = ["-m", "torch.distributed.run", *options, f"--master-port={PORT}"]
        loop = [str(EXAMPLE), "--servers=2", "downpour(shards=2, replicas=1, lr=0.02)"]
        launchers.append(hosts.start(host, [*torchrun, *loop], tmp_path, more))
    said = [launcher.communicate(timeout=LONG_S) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    out, errors = said[0]
    assert "2 ranks on 2 hosts, and 2 of the launcher's processes serve" in errors
    assert ("unencrypted" in errors) != has_keys
    assert "2 worker(s)" in out
    assert "'once': 1437, 'twice': 0, 'never': 0" in out
    assert left(tmp_path) == []


def started(
    hosts: Hosts, size: int, folder: Path, *arguments: str, again: int | None = None
) -> list[tuple[int, str, str]]:
    """The ends and outputs of the processes of `LOOP`, the first half of them on the first host.

    Rank `again` is started again when it has ended.
    """
    (folder / "loop.py").write_text(LOOP)
    for name in ("killed", "back"):
        os.mkfifo(folder / name)
    keys = keys_in(folder)

    def start(rank: int) -> subprocess.Popen[str]:
        each = size // 2
        where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
        words = {name: str(value) for name, value in where.items()}
        return hosts.start(rank // each, [str(folder / "loop.py"), str(folder), *arguments], folder, words | keys)

    processes = [start(rank) for rank in range(size)]
    if again is not None:
        processes[again].communicate(timeout=LONG_S)
        processes[again] = start(again)
    said = [process.communicate(timeout=LONG_S) for process in processes]
    return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def test_where_the_server_of_a_host_is_killed_the_other_hosts_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    """Ranks 1 and 3 serve; rank 3 is killed."""
    ended = started(hosts, 4, tmp_path, "async_sgd(shards=2, replicas=1)", "2", "3")
    assert [code for code, _, _ in ended] == [0, 0, 0, -signal.SIGKILL], ended
    assert ledger(ended[0][1]) == (SAMPLES, 0, 0)
    assert "worker 1 of 2, 2" in ended[2][1]
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("strategy", "servers", "rank"), [("ssp(bound=2)", 0, 1), ("async_sgd(shards=2, replicas=1)", 2, 2)]
)
def test_a_worker_of_another_host_comes_back(
    strategy: str, servers: int, rank: int, hosts: Hosts, tmp_path: Path
) -> None:
    """The worker's second process has its keys from a file, for it is in no process group."""
    ended = started(hosts, 2 + servers, tmp_path, strategy, str(servers), "-2", again=rank)
    assert [code for code, _, _ in ended] == [0] * (2 + servers), ended
    assert ledger(ended[0][1]) == (SAMPLES, 0, 0)
    assert "worker 1 of 2, None: None" in ended[rank][1]
    assert left(tmp_path) == []
