"""One run at a time writes to a folder: a second run, a lost owner, and an owner that stood still too long."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import polytempo as pt
from object_store import bucket
from polytempo.cli.options.folder import checked_folder
from polytempo.core.errors import PolytempoError
from polytempo.core.system import folder_lock
from polytempo.core.system.folder_lock import FolderTaken, Heartbeat, Owner, bears, held, is_lock, mark_of
from polytempo.core.system.url_path import Place, UrlPath, place
from polytempo.engines.processes.fork import fork
from polytempo.jobs import find
from polytempo.runs.frame.folder import began
from polytempo.runs.run import join

QUICK = Heartbeat(beat_s=0.01, stale_s=0.2)
STILL = Heartbeat(beat_s=3600.0, stale_s=0.05)
PATIENT = Heartbeat(beat_s=0.01, stale_s=60.0)
"""A heartbeat in the tests' own process: an owner that is taken over (a busy machine is enough) ends its process."""
KINDS = ["folder", "bucket", "memory"]


@pytest.fixture(params=KINDS)
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A folder, and places in filesystems that do and do not decide who is first."""
    urls = {"folder": str(tmp_path), "bucket": bucket(tmp_path), "memory": f"memory://{tmp_path.name}"}
    return place(urls[request.param])


def locks(out: Place) -> list[str]:
    return [entry.name for entry in out.iterdir() if is_lock(entry.name)]


def left(out: Place, number: int, owner: Owner | bytes) -> None:
    """A lock of an owner that writes no more."""
    content = owner if isinstance(owner, bytes) else msgspec.json.encode(owner)
    path = out / f".lock-{number:08d}.json"
    _ = path.write(content) if isinstance(path, UrlPath) else path.write_bytes(content)


def elsewhere(pid: int = 7) -> Owner:
    return Owner("far", "another machine", pid, 1000.0, "token")


def ended() -> int:
    """The number of a process that has ended."""
    child = fork(lambda: os._exit(0))
    os.waitpid(child, 0)
    return child


def killed_with(out: Place) -> int:
    """A process that is killed while it holds `out`."""

    def hold() -> None:
        with held(out, QUICK):
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return child


def test_a_second_owner_is_refused_by_name_and_nothing_is_left(out: Place) -> None:
    with held(out, PATIENT):
        with pytest.raises(FolderTaken) as refused, held(out, PATIENT):
            pass
        assert (refused.value.host, refused.value.pid) == (os.uname().nodename, os.getpid())
        assert locks(out) == [".lock-00000001.json"]
    assert locks(out) == []
    with held(out, PATIENT):
        pass


def test_a_lock_that_cannot_be_written_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run of this process holds the folder immediately."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), held(tmp_path):
            pass
    assert (os.listdir(tmp_path), os.listdir("/proc/self/fd")) == ([], before)
    with held(tmp_path):
        assert locks(tmp_path)


@pytest.mark.parametrize("listed", [[], [1], [1, 2, 7]], ids=str)
def test_a_store_whose_listings_are_late_excludes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[int]
) -> None:
    """Listings lack locks that are there, or show removed ones."""
    out = place(bucket(tmp_path))
    monkeypatch.setattr(folder_lock.Lock, "_numbers", lambda self: listed)
    for _ in range(3):
        with held(out, PATIENT):
            with pytest.raises(FolderTaken) as refused, held(out, PATIENT):
                pass
            assert (refused.value.host, refused.value.pid) == (os.uname().nodename, os.getpid())
        assert locks(out) == []


def test_a_store_that_shows_each_time_another_lock_is_named_with_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = place(bucket(tmp_path))
    monkeypatch.setattr(folder_lock, "_LOOK_S", 0.0)
    monkeypatch.setattr(folder_lock.Lock, "_created", lambda self: False)
    monkeypatch.setattr(folder_lock.Lock, "_numbers", lambda self: [5])
    with pytest.raises(PolytempoError, match=r"lock-00000005.json.*were seen, and none can be read.*listings") as error:
        folder_lock.Lock(out, QUICK).acquire()
    assert not isinstance(error.value, FolderTaken)


def test_of_several_that_come_at_once_one_holds(out: Place) -> None:
    held_by, refused, all_came = [], [], threading.Barrier(6)

    def come(number: int) -> None:
        try:
            with held(out, PATIENT):
                held_by.append(number)
                all_came.wait()
        except FolderTaken:
            refused.append(number)
            all_came.wait()

    threads = [threading.Thread(target=come, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held_by), len(refused)) == (1, 5)


def test_the_lock_of_a_process_that_was_killed_is_taken_over_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = place(bucket(tmp_path))
    for where in (tmp_path, out):
        pid = killed_with(where)
        with held(where, Heartbeat(0.01, 3600.0)):  # it need not be watched
            assert locks(where) == [".lock-00000002.json"]
        assert f"process {pid} on " in capsys.readouterr().err


@pytest.mark.parametrize("owner", [elsewhere(), b"", b"{", b'{"pid": "x"}'], ids=["far", "empty", "cut", "forged"])
def test_a_count_that_stands_still_is_taken_over(out: Place, owner: Owner | bytes) -> None:
    left(out, 4, owner)
    with held(out, QUICK):
        assert locks(out) == [".lock-00000005.json"]
    assert locks(out) == []


def test_a_count_that_grows_on_another_machine_is_not(out: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its clock is years behind."""
    left(out, 1, elsewhere())
    read, beats = folder_lock.Lock._read, iter(range(1, 10**6))

    def grows(self: folder_lock.Lock, number: int) -> bytes | None:
        left(out, 1, msgspec.structs.replace(elsewhere(), beats=next(beats)))
        return read(self, number)

    monkeypatch.setattr(folder_lock.Lock, "_read", grows)
    with pytest.raises(FolderTaken) as refused, held(out, Heartbeat(0.01, 3600.0)):
        pass
    assert (refused.value.host, refused.value.pid, refused.value.since_s) == ("far", 7, 1000.0)


def test_processes_that_outlive_their_launcher_hold_its_folder(tmp_path: Path) -> None:
    goes_on, ends = os.pipe()

    def hold() -> None:
        with held(tmp_path, QUICK):
            fork(lambda: os._exit(len(os.read(goes_on, 1))))
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(hold), 0)
    with pytest.raises(FolderTaken), held(tmp_path, STILL):
        pass
    os.write(ends, b".")
    with held(tmp_path, QUICK):
        pass


@pytest.mark.parametrize("usurped", [lambda out: left(out, 2, elsewhere()), lambda out: left(out, 1, elsewhere())])
def test_an_owner_whose_folder_was_taken_over_ends(out: Place, usurped: Callable[[Place], None]) -> None:
    if not isinstance(out, UrlPath) or out.url.startswith("bucket"):  # else no other process sees it

        def hold() -> None:
            with held(out, QUICK):
                usurped(out)
                threading.Event().wait(60)

        child = fork(hold)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_folder_that_was_removed_ends_no_run(out: Place) -> None:
    with held(out, QUICK) as lock:
        assert lock is not None
        for name in locks(out):
            entry = out / name
            _ = entry.remove() if isinstance(entry, UrlPath) else entry.unlink()
        assert lock._thread.is_alive()
        lock.rest()


def test_a_start_that_is_refused_removes_nothing_of_the_owner(tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"
    with began(out):
        with pytest.raises(FolderTaken), began(out):
            pass
        assert locks(out)
    assert list(out.iterdir()) == []


def test_a_held_folder_is_recognised_by_its_mark(tmp_path: Path) -> None:
    with held(tmp_path):
        mark = mark_of(tmp_path)
        assert bears(tmp_path, mark)
        assert not bears(tmp_path / "elsewhere", mark)
        assert not bears(tmp_path, mark + "x")
    assert not bears(tmp_path, mark)
    assert (mark_of(tmp_path), bears(tmp_path, ""), bears(tmp_path, "../x:")) == ("", False, False)


def test_a_lock_that_is_left_is_not_taken_for_a_file_of_somebody(tmp_path: Path) -> None:
    left(tmp_path, 1, elsewhere(ended()))
    assert checked_folder(tmp_path, resume=False) == tmp_path


@pytest.mark.parametrize(
    "program",
    [
        lambda out: pt.run(find("digits"), pt.strategies.sync_sgd(), workers=2, steps=2, out=out),
        lambda out: pt.run(find("digits"), pt.strategies.sync_sgd(), workers=2, steps=2, out=out, min_workers=1),
        lambda out: pt.run(find("digits"), pt.strategies.downpour(), workers=2, steps=2, out=out),
        lambda out: pt.simulate(find("digits"), pt.strategies.sync_sgd(), 2, steps=2, out=out),
        lambda out: pt.simulate(find("digits"), pt.strategies.downpour(), 2, steps=2, out=out),
        lambda out: pt.compare(find("digits"), [pt.strategies.sync_sgd()], workers=2, steps=2, out=out),
        lambda out: pt.Trainer(find("digits"), pt.strategies.sync_sgd(), steps=2, out=out).fit(),
        lambda out: join(find("digits"), pt.strategies.sync_sgd(), steps=2, out=out),
    ],
    ids=["ranks", "elastic", "served", "simulated", "simulated served", "compared", "own script", "joined"],
)
def test_whatever_writes_a_folder_holds_it(tmp_path: Path, program: Callable[[Path], object]) -> None:
    with held(tmp_path):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1}) + "\n")
        with pytest.raises(FolderTaken):
            program(tmp_path)
        assert sorted(entry.name for entry in tmp_path.iterdir() if not is_lock(entry.name)) == ["metrics.jsonl"]
        assert (tmp_path / "metrics.jsonl").stat().st_size
