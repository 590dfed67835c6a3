"""`pt.init()` joins the world that a launcher has set up, says which, and is a world of one otherwise."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import polytempo as pt
from polytempo.engines.join import init as joining
from polytempo.engines.join.environment import recognise
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.wire.keys import make_keys, write_keys
from polytempo.worlds import current, set_current

pytestmark = pytest.mark.process

SOURCE = Path(pt.__file__).parents[1]

SCRIPT = """
import json, os, pathlib, sys
import torch
import polytempo as pt

world = pt.init(timeout_s=30)
assert pt.init(quiet=True) is world

async def program(port):
    return await port.all_reduce(torch.tensor([port.rank + 1.0]))

total = world.drive(program(world.port)).item()
mine = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdecimal()
        and os.path.lexists(f"/proc/self/fd/{name}")}
listening = []
for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in mine:
            listening.append(local.partition(":")[0])
answer = [world.rank, world.size, total, list(world.port.hosts), sorted(set(listening))]
pathlib.Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(answer))
"""

LOOPBACK = ["0100007F"]
"""127.0.0.1 as /proc writes it: all that a process may listen on here."""


class Ended(NamedTuple):
    """The remains of a world's processes."""

    answers: list[Any]
    said: list[str]
    """Each process's standard error."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def plain_environment() -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM_", "OMPI_", "PMIX_", "POLYTEMPO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return kept | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def ended(script: Path, commands: list[list[str]], environments: list[dict[str, str]]) -> Ended:
    processes = [
        subprocess.Popen(
            [sys.executable, *command, str(script), str(script.parent)],
            env=plain_environment() | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return Ended([json.loads(path.read_text()) for path in sorted(script.parent.glob("*.json"))], said)


def torch_variables(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node1",
        "MASTER_PORT": str(port),
    }


def open_mpi_variables(rank: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(port),
    }


LAUNCHERS = {"torchrun": torch_variables, "Slurm": slurm_variables, "Open MPI": open_mpi_variables}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_find_each_other_by_what_a_launcher_has_set(launcher: str, script: Path) -> None:
    port = free_port()
    answers, said = ended(script, [[], []], [LAUNCHERS[launcher](rank, port) for rank in range(2)])
    assert answers == [[0, 2, 3.0, [0, 0], LOOPBACK], [1, 2, 3.0, [0, 0], []]]  # rank 0 keeps the store
    assert said == [f"polytempo: {launcher}, 2 ranks on 1 host\n", ""]


def test_with_keys_ranks_meet_at_a_store_that_strangers_cannot_use(script: Path, tmp_path: Path) -> None:
    folder, port = tmp_path / "private", free_port()
    folder.mkdir(mode=0o700)
    write_keys(folder / "keys", make_keys())
    variables = [{**slurm_variables(rank, port), "POLYTEMPO_KEYS": str(folder / "keys")} for rank in range(2)]
    answers, _ = ended(script, [[], []], variables)
    assert answers == [[0, 2, 3.0, [0, 0], LOOPBACK], [1, 2, 3.0, [0, 0], []]]


def test_torchrun_itself(script: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    answers, (said,) = ended(script, [command], [{}])
    assert answers == [[rank, 2, 3.0, [0, 0], []] for rank in range(2)]  # the agent keeps the store
    assert said.count("polytempo: torchrun, 2 ranks on 1 host\n") == 1


def test_nobody_there_is_a_world_of_one(script: Path) -> None:
    answers, said = ended(script, [[]], [{}])
    assert answers == [[0, 1, 1.0, [0], []]]
    assert said == ["polytempo: a world of one\n"]


def test_a_program_with_a_closed_standard_error_joins_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert pt.init().size == 1
    sys.stderr.close()


def test_a_busy_port_is_named(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=rf"rank 0 cannot listen on localhost:{port} .*MASTER_PORT free there"):
            ended(script, [[]], [torch_variables(0, port)])


def test_a_contradiction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    set_current(None)
    with pytest.raises(ValueError, match="RANK=2 must be less than WORLD_SIZE=2"):
        pt.init()


def test_a_host_that_others_cannot_reach_is_named(script: Path) -> None:
    port = free_port()
    variables = torch_variables(0, port) | {"LOCAL_WORLD_SIZE": "1"}
    message = r"MASTER_ADDR=localhost is \S+ here, which other hosts cannot reach, .*; set MASTER_ADDR to an address of"
    with pytest.raises(AssertionError, match=message):
        ended(script, [[]], [variables])


@pytest.mark.parametrize(
    ("found", "spread", "expected"),
    [
        (["192.0.2.1", "127.0.0.1"], False, "127.0.0.1"),  # first an address of no process here; then a real one
        (["127.0.1.1", "0.0.0.0"], True, "0.0.0.0"),
    ],
)
def test_every_address_of_a_name_is_tried(
    found: list[str], spread: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [(*stream, (name, port)) for name in found])
    with socket.socket(fileno=joining._bound("somewhere", 0, spread=spread)) as listener:
        assert listener.getsockname()[0] == expected


def test_a_rank_does_not_wait_for_a_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher has ended: torch's file store would look for the file for five minutes."""
    for name, value in {"RANK": "0", "SIZE": "2", "RENDEZVOUS": str(tmp_path / "gone")}.items():
        monkeypatch.setenv(f"POLYTEMPO_{name}", value)
    with pytest.raises(pt.errors.PeerLost):
        pt.init(quiet=True, timeout_s=0.1)


ENDING = """
import atexit, os, pathlib, sys

def threads():
    tasks = pathlib.Path("/proc/self/task")
    names = [(tasks / task / "comm").read_text() for task in os.listdir(tasks)]
    pathlib.Path(sys.argv[1], f"{world.rank}.json").write_text(str(sum("gloo" in name for name in names)))

atexit.register(threads)  # the first to be registered is the last to be called

import torch
import polytempo as pt

world = pt.init(timeout_s=30, quiet=True)

import torch._dynamo  # as the first optimizer does: it loads much of torch.distributed

async def program(port):
    inner = port.among((1, 0))
    return await inner.all_reduce(await port.all_reduce(torch.ones(1)))

assert world.drive(program(world.port)).item() == 4.0
"""


def test_no_thread_of_the_transport_outlives_the_interpreter(tmp_path: Path) -> None:
    """Such a thread could ask for Python's lock after Python's end, which aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    port = free_port()
    answers, _ = ended(script, [[], []], [torch_variables(rank, port) for rank in range(2)])
    assert answers == [0, 0]


# --- inside workers of our own engine


def test_a_process_group_that_exists_already_is_used() -> None:
    def work(rank_info: RankInfo) -> Result:
        place = recognise(os.environ)
        dist.init_process_group(
            "gloo", init_method=f"file://{rank_info.rendezvous}/mine", rank=place.rank, world_size=place.size
        )
        group = dist.group.WORLD
        world = pt.init(quiet=True)
        assert dist.group.WORLD is group
        assert current() is world is pt.init()
        return [world.rank, world.size]

    assert launch(work, 2, threads=1, timeout_s=30) == [[0, 2], [1, 2]]


def test_a_process_group_without_a_launcher_is_announced_as_such(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import sys, torch.distributed as dist\n"
        "store = dist.FileStore(sys.argv[1] + '/store', 2)\n"
        "dist.init_process_group('gloo', store=store, rank=int(sys.argv[2]), world_size=2)\n"
        "import polytempo as pt\n"
        "pt.init()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank)],
            env=plain_environment() | {"GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert said[0] == "polytempo: an existing process group, 2 ranks on 1 host\n"
    assert said[1] == ""


def test_it_says_nothing_when_told_so_and_once_otherwise(tmp_path: Path) -> None:
    def work(rank_info: RankInfo) -> Result:
        pt.init(quiet=rank_info.size == 3)
        pt.init()
        return None

    launch(work, 2, threads=1, logs=tmp_path / "two", timeout_s=30)
    launch(work, 3, threads=1, logs=tmp_path / "three", timeout_s=30)
    logs = {f"{path.parent.name} {path.stem}": path.read_text() for path in sorted(tmp_path.glob("*/*.log"))}
    assert logs == {
        "two rank-0": "polytempo: Polytempo, 2 ranks on 1 host\n",
        "two rank-1": "",
        "three rank-0": "",
        "three rank-1": "",
        "three rank-2": "",
    }


def test_a_missing_rank_is_waited_for_only_so_long() -> None:
    def work(rank_info: RankInfo) -> Result:
        if rank_info.rank == 0:
            with pytest.raises(
                pt.errors.TimedOut, match=r"rank 0, .*meeting all 2 ranks .* did not finish within 0.5 s"
            ):
                pt.init(timeout_s=0.5, quiet=True)
        return None

    assert launch(work, 2, threads=1, timeout_s=30) == [None, None]


def test_tensors_compute_after_joining() -> None:
    """Joining must not change the number of threads or the default dtype."""

    def work(rank_info: RankInfo) -> Result:
        before = (torch.get_num_threads(), str(torch.get_default_dtype()))
        pt.init(quiet=True)
        return [before == (torch.get_num_threads(), str(torch.get_default_dtype()))]

    assert launch(work, 2, threads=1, timeout_s=30) == [[True]] * 2
