"""The number of workers that a machine holds: refusals, and notes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.core.system.first_failure import FirstFailure
from polytempo.engines.processes import capacity, fork
from polytempo.engines.processes.capacity import (
    ProcessLimits,
    batch_notes,
    check_memory,
    check_processes,
    check_simulated,
    cores_notes,
    limits,
)
from polytempo.engines.processes.failures import blame
from polytempo.runs.frame.folder import began

GB = 1_000_000_000
LAPTOP = ProcessLimits(processes=4_000, files=1_024, memory_bytes=8 * GB, cores=2)
NOTHING = ProcessLimits(None, None, None, cores=2)


def test_this_machine_holds_two_workers() -> None:
    found = limits()
    assert found.cores >= 1
    check_processes(2, 2, found)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a/b", {"a/pids.max": "9", "a/pids.current": "2", "a/b/pids.max": "max", "memory.max": "max"}),
        ("0::/a", {"a/pids.max": "7", "a/pids.current": "0", "pids.max": "99", "pids.current": "0"}),
        ("0::/\n4:cpu:/a\n5:pids,cpuset:/a/b", {"pids/a/b/pids.max": "8", "pids/a/b/pids.current": "1"}),
        ("8:pids:/outside", {"pids/pids.max": "7", "pids/pids.current": "0"}),  # a container sees its own group as all
    ],
    ids=["around", "own", "version 1", "version 1, container"],
)
def test_control_groups_of_both_versions_limit_processes(
    own: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity, "_OWN_GROUPS", tmp_path / "own")
    assert limits().processes == 7


@pytest.mark.parametrize(
    ("limit", "used", "cached"),
    [
        ("memory.max", "memory.current", "active_file 500\ninactive_file 500"),
        (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "active_file 7\ntotal_active_file 600\ntotal_inactive_file 400",
        ),
    ],
)
def test_control_groups_of_both_versions_limit_memory(
    limit: str, used: str, cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ((limit, "10000"), (used, "4000"), ("memory.stat", cached), ("own", "0::/")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity, "_OWN_GROUPS", tmp_path / "own")
    assert limits().memory_bytes == 7000


def test_a_process_that_cannot_start_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(BlockingIOError, match=r"limit of processes and threads .*pids.max.*use fewer workers"):
        fork.fork(lambda: None)


@pytest.mark.parametrize(
    ("found", "workers", "message"),
    [
        (
            LAPTOP,
            10_000,
            r"workers=10000 needs 10,000 processes, .* allows 4,000 more; use at most 3,998 workers",
        ),
        (
            LAPTOP,
            481,
            r"needs 1,026 open files in each process, and the limit is 1,024; raise it \(ulimit -n\)",
        ),
        (
            LAPTOP._replace(files=None),
            1_000,
            r"needs at least 8.4 GB of memory \(8 MB each\), and 8.0 GB are free",
        ),
    ],
    ids=["processes", "files", "memory"],
)
def test_what_cannot_run_is_refused(found: ProcessLimits, workers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_processes(workers, workers, found)


def test_servers_are_processes_too() -> None:
    """100 workers and 4,000 copies of shards: no worker less would help, so one is the least that is named."""
    with pytest.raises(ValueError, match=r"workers=100 needs 4,100 processes.*use at most 1 workers"):
        check_processes(4_100, 100, LAPTOP)


def test_what_a_rehearsal_has_measured_is_multiplied() -> None:
    check_memory(GB, 8, LAPTOP)
    with pytest.raises(ValueError, match=r"workers=9 needs at least 9.0 GB .*\(1,000 MB each\).*at most 8 workers"):
        check_memory(GB, 9, LAPTOP)


def test_where_a_machine_does_not_say_nothing_is_refused() -> None:
    check_processes(10**6, 10**6, NOTHING)


def test_many_more_workers_than_cores_are_said() -> None:
    assert cores_notes(8, LAPTOP) == []
    assert cores_notes(9, LAPTOP) == [
        "9 workers share 2 cores, so each step takes them one after the other; simulate that many: pt.simulate, "
        "`polytempo simulate`"
    ]
    assert cores_notes(5, LAPTOP._replace(cores=1))[0].startswith("5 workers share one core")


def test_a_batch_larger_than_the_data_is_said() -> None:
    assert batch_notes(None, 2, 1_000) == []
    assert batch_notes(64, 2, 32) == []
    assert batch_notes(63, 2, 32) == [
        "a step of 2 workers with batch size 32 asks for 64 samples, and there are 63: every step takes all of them, "
        "about 31 a worker"
    ]


def test_more_virtual_workers_than_samples_or_memory_are_refused() -> None:
    model, data = torch.nn.Linear(1000, 1000), pt.Data(TensorDataset(torch.zeros(2_000)))
    check_simulated(model, data, 900, LAPTOP)
    with pytest.raises(ValueError, match="2000 samples cannot be dealt to 2001 workers"):
        check_simulated(model, data, 2_001, LAPTOP)
    with pytest.raises(
        ValueError, match=r"1,500 virtual workers have a model each, 8.03 MB .* use at most 996 workers"
    ):
        check_simulated(model, data, 1_500, LAPTOP)


def test_workers_that_share_models_are_refused_by_what_they_share() -> None:
    model, data = torch.nn.Linear(1000, 1000), pt.Data(TensorDataset(torch.zeros(2_000)))
    small = LAPTOP._replace(memory_bytes=10_000_000)
    check_simulated(model, data, 1_500, small, models=1)
    with pytest.raises(
        ValueError, match=r"1,500 virtual workers have 2 models between them, 8.03 MB .* use a smaller model, or meta"
    ):
        check_simulated(model, data, 1_500, small, models=2)
    with pytest.raises(ValueError, match=r"1,500 virtual workers have 1 model between them"):
        check_simulated(model, data, 1_500, small._replace(memory_bytes=1_000_000), models=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pt.cluster.ethernet(gbit_per_s=-1), "gbit_per_s must be a number above 0, got -1"),
        (lambda: pt.cluster.infiniband(gbit_per_s=0), "gbit_per_s must be a number above 0, got 0"),
        (lambda: pt.cluster.internet(mbit_per_s=float("nan")), "mbit_per_s must be a number above 0, got nan"),
        (lambda: pt.cluster.one_host(workers=0), "workers must be a number above 0, got 0"),
        (lambda: pt.cluster.ethernet(gflops=-2), "gflops must be a number above 0, got -2"),
    ],
    ids=["ethernet", "infiniband", "internet", "one host", "gflops"],
)
def test_a_cluster_names_the_number_that_was_written(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def unencodable(path: Path, *_: object, **__: object) -> None:
    str(path).encode("ascii")


@pytest.mark.parametrize(
    ("name", "broken", "by", "message"),
    [
        ("file/run", None, None, r"out \S+: no folder can be made there \(Not a directory\)"),
        ("run", (os, "access"), lambda *_: False, r"out \S+: this process may not write there"),  # a read-only disk
        ("\xe4", (Path, "mkdir"), unencodable, r"out '\S+xe4': .* ascii .*PYTHONUTF8"),
    ],
    ids=["below a file", "read-only", "the C locale"],
)
def test_a_folder_that_cannot_be_made_is_a_wrong_value(
    name: str, broken: tuple[Any, str] | None, by: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    if broken is not None:
        monkeypatch.setattr(*broken, by)
    with pytest.raises(ValueError, match=message), began(tmp_path / name):
        raise AssertionError("not reached")


def failing(out: Path, source: Callable[[], object]) -> None:
    """A run in `out` that does `source` and fails."""
    with pytest.raises(ZeroDivisionError), began(out):
        source() and 1 / 0


def test_a_start_that_fails_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    """The folder and its new parents go; a run that has begun stays, and so do earlier files."""
    run, other = tmp_path / "runs" / "one", tmp_path / "other"
    failing(run, lambda: [(run / "logs").mkdir(), (run / "metrics.jsonl").touch()])
    assert list(tmp_path.iterdir()) == []
    failing(run, lambda: (run / "metrics.jsonl").write_text("{}"))
    assert (run / "metrics.jsonl").exists()
    with pytest.raises(PolytempoError), began(tmp_path / "dead"):
        raise blame(PolytempoError("rank 1 died"), FirstFailure("rank 1 of 2", "was killed by SIGKILL"))
    assert (tmp_path / "dead").is_dir(), "the line of its death names a log there"
    other.mkdir()
    (other / "mine.txt").touch()
    failing(other, lambda: [(other / "logs").mkdir()])
    assert sorted(path.name for path in other.iterdir()) == ["logs", "mine.txt"]
