"""How many workers a machine holds: what is refused, and what is only said."""

from __future__ import annotations

import pytest

from polytempo.engines.capacity import (
    Limits,
    batch_notes,
    check_memory,
    check_processes,
    cores_notes,
    limits,
)

GB = 1_000_000_000
LAPTOP = Limits(processes=4_000, files=1_024, memory_bytes=8 * GB, cores=2)
NOTHING = Limits(None, None, None, cores=2)


def test_this_machine_holds_two_workers() -> None:
    found = limits()
    assert found.cores >= 1
    check_processes(2, 2, found)


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
def test_what_cannot_run_is_refused(found: Limits, workers: int, message: str) -> None:
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
