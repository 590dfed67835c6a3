"""`HostLock`: its sharers, after any death and any reuse of a descriptor's number."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, Store

from polytempo.engines.processes.fork import fork
from polytempo.worlds.process.lock import HostLock

pytestmark = pytest.mark.process


def store_at(folder: Path) -> Store:
    """The store that all processes of a test share."""
    return FileStore(str(folder / "store"), -1)  # -1: the file stays, whoever has finished with it


def elsewhere(work: Callable[[], bool]) -> bool:
    """The value of `work` in a process of its own, which then ends."""
    child = fork(lambda: os._exit(0 if work() else 3))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def free_elsewhere(folder: Path) -> bool:
    """True if another process may have the lock."""
    return elsewhere(lambda: HostLock(store_at(folder), 0).acquire(0.02))


def test_a_process_excludes_others_until_it_lets_go(tmp_path: Path) -> None:
    lock = HostLock(store_at(tmp_path), 0)
    assert lock.acquire(1)
    assert not free_elsewhere(tmp_path)
    lock.release()
    assert free_elsewhere(tmp_path)


def test_who_comes_after_the_makers_end_shares_with_those_that_live(tmp_path: Path) -> None:
    assert free_elsewhere(tmp_path)
    lock = HostLock(store_at(tmp_path), 0)
    assert free_elsewhere(tmp_path)  # it opens ours, and ends
    assert lock.acquire(1)
    assert not free_elsewhere(tmp_path)
    again = HostLock(store_at(tmp_path), 0)
    assert os.path.samestat(os.fstat(again._descriptor), os.fstat(lock._descriptor))
    assert not free_elsewhere(tmp_path)  # a second lock of this process has taken nothing away


def test_a_number_that_is_another_files_by_now_is_not_opened(tmp_path: Path) -> None:
    first = HostLock(store_at(tmp_path), 0)._descriptor
    stranger = os.open(tmp_path / "store", os.O_RDONLY)
    os.dup2(stranger, first)
    os.close(stranger)
    lock = HostLock(store_at(tmp_path), 0)
    found = os.fstat(lock._descriptor)
    assert not os.path.samestat(found, os.fstat(first))
    assert found.st_mode & 0o777 == 0o600
    os.close(first)
