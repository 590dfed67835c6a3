"""The local engine starts workers, and says which one failed and why."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, but does not tell mypy

from polytempo.core.errors import PeerLost
from polytempo.engines import local_engine as worker_threads
from polytempo.engines.collective import RunTimedOut
from polytempo.engines.engine import Result
from polytempo.engines.join.environment import recognise
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.failures import WorkerDied
from polytempo.engines.processes.worker import RankInfo
from process.launches import rest

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("private")]


# --- workers' arguments and results


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


@pytest.mark.parametrize(
    "block",
    [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu"), partial(torch.device, "meta")],
    ids=["no_grad", "inference", "autocast", "meta"],
)
def test_workers_begin_with_torchs_first_modes_whatever_block_the_launcher_is_in(block: Callable[[], Any]) -> None:
    def work(rank_info: RankInfo) -> Result:
        modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
        return [*modes, str(torch.empty(0).device)]

    with block():
        found = launch(work, 1)
    assert found == [[True, False, False, "cpu"]]


def test_garbage_of_the_launcher_comes_to_its_end_there_alone() -> None:
    """A process group in a cycle, say: its end waits for threads that a fork does not have."""
    ended = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ended.append(os.getpid())

    def work(rank_info: RankInfo) -> Result:
        gc.collect()
        return len(ended)

    gc.collect()
    gc.disable()
    try:
        Cycle()
        assert launch(work, 1, threads=1, timeout_s=30) == [0]
    finally:
        gc.enable()
    gc.collect()
    assert ended == [os.getpid()]


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


def test_a_full_disk_is_named_though_the_log_lies_on_it() -> None:
    def work(rank_info: RankInfo) -> Result:
        os.dup2(os.open("/dev/full", os.O_WRONLY), sys.stderr.fileno())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    with pytest.raises(WorkerDied, match=r"raised OSError: .* left on device: 'metrics\.jsonl' \(exit code 1\)"):
        launch(work, workers=1)
