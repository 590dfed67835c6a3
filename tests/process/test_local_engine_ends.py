"""However a run of the local engine ends, no process, folder or shared memory stays behind."""

from __future__ import annotations

import fcntl
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import polytempo
from polytempo.engines.local_engine import launch
from polytempo.engines.processes import janitor
from polytempo.engines.processes.failures import WorkerDied
from polytempo.engines.processes.fork import fork
from polytempo.engines.processes.janitor import private_folder
from polytempo.engines.processes.worker import RankInfo, Result
from process.launches import rest

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("private")]

DEADLINE_S = 30.0


def test_what_workers_started_ends_with_them(private: Path) -> None:
    def work(rank_info: RankInfo) -> Result:
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        return child

    started = launch(work, 2)
    assert len(set(started)) == 2
    assert [child for child in started if is_running(child)] == []


def test_a_killed_worker_takes_its_data_loaders_along(private: Path) -> None:
    listening, speaking = os.pipe()

    def work(rank_info: RankInfo) -> Result:
        batches = iter(DataLoader(TensorDataset(torch.ones(64, 3)), num_workers=2))
        next(batches)
        os.write(speaking, b"".join(b"%d\n" % process for process in children_of(os.getpid())))
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    with pytest.raises(WorkerDied, match="SIGKILL"):
        launch(work, 1)
    loaders = {int(line) for line in lines_of(listening, count=2)}
    os.close(speaking)
    assert [process for process in loaders if is_running(process)] == []
    assert shared_memory_of(loaders) == []
    assert list(private.iterdir()) == []


def closed_stream() -> io.StringIO:
    """A program may leave such a stream in place of a standard file."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("left", [None, closed_stream()], ids=["none", "closed"])
@pytest.mark.parametrize("closed", [(0,), (1, 2), (0, 1, 2)])
def test_a_launcher_may_have_no_standard_files(
    closed: tuple[int, ...], left: io.StringIO | None, private: Path
) -> None:
    """A daemon has none: the janitor and the workers redirect them, and must not find a pipe of the run there."""
    listening, speaking = os.pipe()

    def launcher() -> None:
        for standard in closed:
            os.close(standard)
            setattr(sys, ("stdin", "stdout", "stderr")[standard], left)
        files = launch(lambda rank_info: [os.readlink(f"/proc/self/fd/{file}") for file in range(3)], 2)
        print("said")
        os.write(speaking, json.dumps(files).encode())

    process = fork(launcher)
    os.close(speaking)
    with os.fdopen(listening, "rb") as answer:
        files = json.loads(answer.read())
    os.waitpid(process, 0)
    assert [[os.path.basename(file) for file in each] for each in files] == [
        ["null", f"rank-{rank}.log", f"rank-{rank}.log"] for rank in range(2)
    ]
    assert list(private.iterdir()) == []


LAUNCHER = """
import os, sys, threading
from polytempo.engines.local_engine import launch

def work(rank_info):
    child = os.fork()
    if child == 0:
        os.write(speaking, b"%d\\n" % os.getpid())
        threading.Event().wait()
    held = memoryview(bytearray(1 << 20))
    os.write(speaking, b"%d\\n" % os.getpid())
    threading.Event().wait()

for line in sys.stdin:  # each launcher is a process of its own, which ends as any interpreter does
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ["TMPDIR"], pipe = line.split()
speaking = os.open(pipe, os.O_WRONLY)
launch(work, 2)
"""


@pytest.fixture(scope="module")
def launchers() -> Iterator[subprocess.Popen[str]]:
    """An interpreter that has loaded all, and forks a launcher for each folder and pipe that it reads."""
    environ = {**os.environ, "PYTHONPATH": str(Path(polytempo.__file__).parents[1])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_launcher(
    number: signal.Signals, private: Path, tmp_path: Path, launchers: subprocess.Popen[str]
) -> None:
    assert launchers.stdin is not None
    assert launchers.stdout is not None
    os.mkfifo(tmp_path / "pipe")
    print(private, tmp_path / "pipe", file=launchers.stdin, flush=True)
    launcher = int(launchers.stdout.readline())
    processes = {int(line) for line in lines_of(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), count=4)}
    processes |= children_of(launcher)
    assert len(processes) == 5  # two workers, a child of each, and the janitor
    assert [path.name.split("-")[0] for path in private.iterdir()] == ["polytempo"]
    watched = [os.pidfd_open(process) for process in processes]
    os.kill(launcher, number)
    assert int(launchers.stdout.readline()) == -number
    ended = [descriptor for descriptor in watched if wait([descriptor], DEADLINE_S)]
    for descriptor in watched:
        os.close(descriptor)
    assert len(ended) == 5
    assert list(private.iterdir()) == []
    assert shared_memory_of(processes) == []


def test_a_private_folder_ends_with_a_process_that_is_killed(private: Path) -> None:
    """calibrate and validate make such folders."""
    goes_on, ends = os.pipe()
    reading, writing = os.pipe()

    def killed() -> None:
        with private_folder() as folder:
            (folder / "run").mkdir()
            os.write(writing, b".")
            os.read(goes_on, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork(killed)
    os.read(reading, 1)
    (janitor,) = children_of(child)
    assert len(list(private.iterdir())) == 1
    watched = os.pidfd_open(janitor)
    os.write(ends, b".")
    os.waitpid(child, 0)
    assert wait([watched], DEADLINE_S)
    assert list(private.iterdir()) == []
    for descriptor in (goes_on, ends, reading, writing, watched):
        os.close(descriptor)


def shared_memory_of(processes: set[int]) -> list[str]:
    """Segments named after one of the processes, as PyTorch names them."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{process}" in name for process in processes)]


def lines_of(descriptor: int, count: int) -> list[bytes]:
    """The first `count` lines from a pipe, which is closed."""
    text = b""
    while text.count(b"\n") < count:
        ready, _, _ = select.select([descriptor], [], [], 60)
        assert ready, f"only {text!r} within a minute"
        text += os.read(descriptor, 1000)
    os.close(descriptor)
    return text.splitlines()


def stat_of(process: str) -> list[str]:
    """State, parent and so on of a process, from /proc; empty where it is gone."""
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def children_of(parent: int) -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal() and stat_of(name)[1:2] == [str(parent)]}


def is_running(process: int) -> bool:
    return stat_of(str(process))[:1] not in ([], ["Z"])


# --- the remains of a launcher and a janitor killed together


def left(private: Path, name: str, content: str | None = "locked while this run lives\n") -> Path:
    folder = private / name
    (folder / "mail").mkdir(parents=True)
    if content is not None:
        (folder / "owner").write_text(content)
    return folder


def test_the_next_run_sweeps_what_a_launcher_and_a_janitor_left_that_were_killed_together(private: Path) -> None:
    reading, writing = os.pipe()

    def killed() -> None:
        def work(rank_info: RankInfo) -> Result:
            children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
            os.write(writing, (" ".join(children) + "\n").encode())
            return rest(rank_info)

        launch(work, workers=1)

    launcher = fork(killed)
    os.close(writing)
    with os.fdopen(reading) as lines:
        watcher = next(int(child) for child in lines.readline().split() if is_janitor(int(child)))
        os.kill(watcher, signal.SIGSTOP)
        os.kill(launcher, signal.SIGKILL)
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
        lines.read()  # ends with the worker
    (folder,) = private.iterdir()
    assert launch(lambda rank_info: rank_info.rank, workers=1) == [0]
    assert list(private.iterdir()) == [], folder


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_run_ends_whatever_becomes_of_its_janitor(number: signal.Signals, private: Path) -> None:
    launcher, before = os.getpid(), children_of(os.getpid())

    def work(rank_info: RankInfo) -> Result:
        (watcher,) = children_of(launcher) - before - {os.getpid()}
        os.kill(watcher, number)
        return watcher

    (watcher,) = launch(work, workers=1)
    assert not is_running(watcher)
    assert list(private.iterdir()) == []


def kills_itself(rank_info: RankInfo) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_run_ends_where_sigchld_is_ignored(private: Path) -> None:
    """A parent may pass that on: the kernel collects children then. In another thread Python cannot change that."""
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert launch(lambda rank_info: str(signal.getsignal(signal.SIGCHLD)), 2) == ["0", "0"]
        with pytest.raises(WorkerDied, match="SIGKILL"):
            launch(kills_itself, 1)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(launch, lambda rank_info: rank_info.rank, 2).result() == [0, 1]
            failure = other.submit(launch, kills_itself, 1).exception()
        assert isinstance(failure, WorkerDied)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, ignored)


def test_a_stopped_agent_whose_starter_is_gone_leaves_no_process(private: Path) -> None:
    """The agent cannot see that it is alone, and a kill of ssh does not reach it: its janitor ends it."""
    listening, speaking = os.pipe()

    def agent(starter: int) -> None:
        with janitor.swept(private / "polytempo-00000001", starter) as notes:

            def worker() -> None:
                os.setsid()
                janitor.begin(notes)
                signal.pause()

            os.write(speaking, b"%d\n%d\n" % (os.getpid(), fork(worker)))
            os.kill(os.getpid(), signal.SIGSTOP)

    def starts() -> None:
        parent = os.getpid()
        fork(lambda: agent(parent))
        signal.pause()

    starter = fork(starts)
    processes = [int(line) for line in lines_of(listening, count=2)]
    os.close(speaking)
    watched = [os.pidfd_open(process) for process in processes]
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    ended = [descriptor for descriptor in watched if wait([descriptor], DEADLINE_S)]
    for descriptor in watched:
        os.close(descriptor)
    assert len(ended) == 2
    while list(private.iterdir()):
        os.sched_yield()


def is_janitor(process: int) -> bool:
    """The janitor is the child that has closed everything but a pipe."""
    return not os.readlink(f"/proc/{process}/fd/1").endswith(".log")


def test_only_what_a_dead_run_of_this_user_left_is_swept(private: Path) -> None:
    elsewhere = left(private, "thesis")
    (private / "polytempo-00000001").symlink_to(elsewhere)
    kept = [
        left(private, "polytempo-0000000g"),
        left(private, "polytempo-00000002", None),
        left(private, "polytempo-00000003", ""),
        left(private, "polytempo-00000004"),
        left(private, "polytempo-00000005", None),
        elsewhere,
        private / "polytempo-00000001",
    ]
    (private / "polytempo-00000005" / "owner").symlink_to(elsewhere / "owner")
    swept = left(private, "polytempo-00000006")
    with (private / "polytempo-00000004" / "owner").open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert launch(lambda rank_info: rank_info.rank, workers=1) == [0]
    assert all(os.path.lexists(path) for path in kept)
    assert (elsewhere / "owner").exists()
    assert not swept.exists()
