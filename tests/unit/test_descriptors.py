"""Descriptors of a process: as many as the system allows, and a reserve for saving when none are left."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest

from polytempo.core.system import descriptors, files
from polytempo.engines.processes.fork import fork

SOFT, HARD = 256, 1024


def in_child(check: object) -> bool:
    """True if `check` passes in a process with the soft limit `SOFT` and the hard limit `HARD`."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
        check()  # type: ignore[operator]
        os._exit(0)

    return os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0


def exhausted() -> None:
    with suppress(OSError):
        while True:
            os.dup(0)


def test_the_soft_limit_is_raised_and_a_reserve_left() -> None:
    def check() -> None:
        for _ in range(2):
            assert descriptors.raised() == HARD - descriptors.RESERVE

    assert in_child(check)


def test_without_descriptors_a_file_is_still_written(tmp_path: Path) -> None:
    def check() -> None:
        descriptors.raised()
        exhausted()
        files.replace(tmp_path / "a", "saved")
        with files.append(tmp_path / "a") as first, files.create(tmp_path / "b") as second:
            assert max(first.fileno(), second.fileno()) < HARD
        exhausted()
        with pytest.raises(OSError, match="Too many open files"):
            files.create(tmp_path / "c")

    assert in_child(check)
    assert (tmp_path / "a").read_text() == "saved"
