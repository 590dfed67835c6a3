"""The local engine starts workers, says which one failed and why, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, but does not tell mypy
from torch.utils.data import DataLoader, TensorDataset

import polytempo
from polytempo.core.errors import PeerLost
from polytempo.engines import threads as worker_threads
from polytempo.engines.collective import RunTimedOut
from polytempo.engines.engine import Result
from polytempo.engines.environment import recognise
from polytempo.engines.failures import WorkerDied
from polytempo.engines.fork import fork
from polytempo.engines.launch import launch
from polytempo.engines.worker import RankInfo

pytestmark = pytest.mark.process

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def private(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private folders come into being in this test: afterwards, none may be there."""
    folder = tmp_path_factory.mktemp("p")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def rest(rank_info: RankInfo) -> Result:
    """Wait for a signal that never comes."""
    threading.Event().wait()
    return None


# --- what workers are told, and what they give back


def test_results_come_in_the_order_of_ranks(private: Path) -> None:
    offset = 10  # closures need no pickling

    def work(rank_info: RankInfo) -> Result:
        return {"rank": rank_info.rank, "size": rank_info.size, "sum": offset + rank_info.rank}

    assert launch(work, 3) == [{"rank": rank, "size": 3, "sum": 10 + rank} for rank in range(3)]
    assert list(private.iterdir()) == []


def test_a_worker_is_a_process_of_its_own_that_recognises_its_place() -> None:
    def work(rank_info: RankInfo) -> Result:
        place = recognise(os.environ)
        mode = rank_info.rendezvous.stat().st_mode & 0o777
        return [os.getpid(), os.getpgid(0), place.launcher, place.rank, place.rendezvous == rank_info.rendezvous, mode]

    told = launch(work, 2)
    assert [line[2:] for line in told] == [["Polytempo", rank, True, 0o700] for rank in range(2)]
    processes = {line[0] for line in told}
    assert len(processes | {os.getpid()}) == 3
    assert {line[1] for line in told} == processes


def test_workers_meet_over_the_rendezvous_folder() -> None:
    def work(rank_info: RankInfo) -> Result:
        store = FileStore(str(rank_info.rendezvous / "store"), rank_info.size)
        dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.size)
        total = torch.tensor([float(rank_info.rank + 1)])
        dist.all_reduce(total)
        return total.item()

    assert launch(work, 3, timeout_s=30) == [6.0, 6.0, 6.0]


def test_output_goes_to_one_log_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank_info: RankInfo) -> Result:
        print(f"printed by {rank_info.rank}")
        os.write(2, b"written\n")
        return None

    assert launch(work, 2, logs=tmp_path / "logs") == [None, None]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"rank-{rank}.log": f"printed by {rank}\nwritten\n" for rank in range(2)}
    assert capfd.readouterr() == ("", "")


def test_a_tick_is_heard_while_workers_run(tmp_path: Path) -> None:
    listening, speaking = os.pipe()

    def work(rank_info: RankInfo) -> Result:
        return os.read(listening, 1).decode()  # until the launcher has ticked

    assert launch(work, 1, tick=lambda: os.write(speaking, b"t"), timeout_s=30) == ["t"]
    os.close(listening)
    os.close(speaking)


# --- threads


@pytest.mark.parametrize(
    ("strangers", "cores", "workers", "asked", "threads"),
    [(0, 8, 2, None, 4), (0, 8, 3, None, 2), (0, 2, 4, None, 1), (0, 2, 1, 3, 3), (5, 8, 2, None, 1), (5, 8, 2, 1, 1)],
)
def test_threads_per_worker(
    monkeypatch: pytest.MonkeyPatch, strangers: int, cores: int, workers: int, asked: int | None, threads: int
) -> None:
    monkeypatch.setattr(worker_threads, "_native_threads", lambda: strangers)
    monkeypatch.setattr(worker_threads, "_cores", lambda: cores)
    assert worker_threads.threads_per_worker(workers, asked) == threads


def test_threads_that_a_fork_would_lose_are_refused(monkeypatch: pytest.MonkeyPatch, private: Path) -> None:
    monkeypatch.setattr(worker_threads, "_native_threads", lambda: 3)
    with pytest.raises(ValueError, match=r"threads=2 is impossible: .*\(3 are not Python's\).* use threads=1"):
        launch(rest, 1, threads=2)
    assert list(private.iterdir()) == []


def test_workers_compute_after_the_launcher_has_computed_with_openmp() -> None:
    torch.randn(1 << 20).add_(1)  # from here on this process has OpenMP's threads, if it has two cores

    def work(rank_info: RankInfo) -> Result:
        return [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], torch.ones(1 << 20).add_(1).sum().item()]

    assert launch(work, 2, threads=1, timeout_s=30) == [[1, "1", float(2 << 20)]] * 2


@pytest.mark.parametrize(("workers", "threads", "message"), [(0, None, "workers=0"), (1, 0, "threads=0")])
def test_impossible_arguments_are_refused(workers: int, threads: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(rest, workers, threads=threads)


# --- a worker fails


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def raise_error() -> None:
    raise ArithmeticError("the loss is not a number")


Ending = tuple[Callable[[], object], int | None, str | None, str, str]

ENDINGS: dict[str, Ending] = {
    "kill": (kill, None, "SIGKILL", "was killed by SIGKILL", "| before"),
    "exit": (lambda: os._exit(3), 3, None, "ended without a result (exit code 3)", "| before"),
    "exit 0": (lambda: os._exit(0), 0, None, "ended without a result (exit code 0)", "| before"),
    "sys.exit": (lambda: sys.exit(4), 4, None, "raised SystemExit: 4 (exit code 4)", "| SystemExit: 4"),
    "segfault": (segfault, None, "SIGSEGV", "was killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
    "raise": (
        raise_error,
        1,
        None,
        "raised ArithmeticError: the loss is not a number (exit code 1)",
        "| ArithmeticError: the loss is not",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_first_worker_that_fails_ends_the_run(ending: str, private: Path) -> None:
    end, exit_code, killed_by, how, line = ENDINGS[ending]

    def work(rank_info: RankInfo) -> Result:
        if rank_info.rank == 1:
            print("before")
            end()
        return rest(rank_info)

    with pytest.raises(WorkerDied) as died:
        launch(work, 3)
    assert (died.value.rank, died.value.exit_code, died.value.signal) == (1, exit_code, killed_by)
    assert f"rank 1 of 3 {how}; the run has ended" in str(died.value)
    assert line in str(died.value)
    assert list(private.iterdir()) == []


def test_the_last_twenty_lines_are_quoted(tmp_path: Path) -> None:
    def work(rank_info: RankInfo) -> Result:
        for number in range(100):
            print("line", number)
        os._exit(1)

    with pytest.raises(WorkerDied) as died:
        launch(work, 1, logs=tmp_path)
    assert died.value.last_lines == [f"line {number}" for number in range(80, 100)]
    assert len((tmp_path / "rank-0.log").read_text().splitlines()) == 100


def test_the_cause_is_named_before_those_who_lost_a_peer() -> None:
    listening, speaking = os.pipe()

    def work(rank_info: RankInfo) -> Result:
        if rank_info.rank == 0:
            os.write(speaking, b"0")
            raise PeerLost(0, 7, "all_reduce", 1)
        os.read(listening, 1)  # rank 0 has noticed already; rank 1 is only now seen to be dead
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    with pytest.raises(WorkerDied) as died:
        launch(work, 2)
    os.close(listening)
    os.close(speaking)
    assert (died.value.rank, died.value.signal) == (1, "SIGKILL")
    assert str(died.value).endswith(f"Also: rank 0 raised PeerLost: {PeerLost(0, 7, 'all_reduce', 1)} (exit code 1)")


@pytest.mark.parametrize(("result", "error"), [({1, 2}, "TypeError"), ("x" * (64 << 20), "ValueError")])
def test_a_result_must_be_json_of_bounded_size(result: Result, error: str) -> None:
    with pytest.raises(WorkerDied, match=f"raised {error}"):
        launch(lambda rank_info: result, 1)


def test_a_worker_that_does_not_listen_is_killed(private: Path) -> None:
    listening, speaking = os.pipe()

    def work(rank_info: RankInfo) -> Result:
        if rank_info.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(speaking, b"0")
            return rest(rank_info)
        os.read(listening, 1)
        os._exit(9)

    with pytest.raises(WorkerDied, match="exit code 9"):
        launch(work, 2)
    os.close(listening)
    os.close(speaking)
    assert list(private.iterdir()) == []


def test_a_run_that_hangs_is_ended_and_says_where(private: Path) -> None:
    with pytest.raises(RunTimedOut) as hung:
        launch(lambda rank_info: rest(rank_info) if rank_info.rank else None, 2, timeout_s=2)
    assert hung.value.ranks == [1]
    assert "not over within 2 s; still running: rank 1" in str(hung.value)
    assert "test_local_engine.py" in str(hung.value)
    assert "in rest" in str(hung.value)
    assert list(private.iterdir()) == []


# --- nothing is left behind


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


LAUNCHER = """
import os, sys, threading
from polytempo.engines.launch import launch

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


def test_a_full_disk_is_named_though_the_log_lies_on_it() -> None:
    def work(rank_info: RankInfo) -> Result:
        os.dup2(os.open("/dev/full", os.O_WRONLY), sys.stderr.fileno())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    with pytest.raises(WorkerDied, match=r"raised OSError: .* left on device: 'metrics\.jsonl' \(exit code 1\)"):
        launch(work, workers=1)


# --- what a launcher and a janitor that are killed together leave


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
        janitor = next(int(child) for child in lines.readline().split() if is_janitor(int(child)))
        os.kill(janitor, signal.SIGSTOP)
        os.kill(launcher, signal.SIGKILL)
        os.kill(janitor, signal.SIGKILL)
        os.waitpid(launcher, 0)
        lines.read()  # ends with the worker
    (folder,) = private.iterdir()
    assert launch(lambda rank_info: rank_info.rank, workers=1) == [0]
    assert list(private.iterdir()) == [], folder


def is_janitor(process: int) -> bool:
    """It is the child that has closed everything but a pipe."""
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
