"""Snapshots of shards: written bytes are read back or refused by name; earlier ones survive anything."""

from __future__ import annotations

import errno
import math
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from polytempo.server.snapshots import snapshot as snapshot_module
from polytempo.server.snapshots.disk import Content, Disk, LocalDisk, Writer
from polytempo.server.snapshots.snapshot import (
    OtherVersion,
    SnapshotError,
    SnapshotPart,
    SnapshotWriter,
    WrittenSnapshot,
    complete,
    discard_beyond,
    newest_whole,
    read,
    write,
)

EXTENSIONS = ("safetensors", "json")


class Crash(BaseException):
    """The process stops here: no handler of `Exception` sees it."""


class Failing:
    """The real disk until its `at`-th change, which fails by `error`, as all changes after it do if `stays`."""

    def __init__(self, at: int, error: BaseException, stays: bool = False) -> None:
        self.real, self.at, self.error, self.stays = LocalDisk(), at, error, stays
        self.changes: list[str] = []

    def step(self, what: str) -> None:
        self.changes.append(what)
        if len(self.changes) == self.at or (self.stays and len(self.changes) > self.at):
            raise self.error

    def create(self, path: Path) -> Writer:
        self.step("create")
        return FailingWriter(self, self.real.create(path))

    def read(self, path: Path, most_bytes: int) -> bytes:
        return self.real.read(path, most_bytes)

    def size(self, path: Path) -> int:
        return self.real.size(path)

    def rename(self, old: Path, new: Path) -> None:
        self.step("rename")
        self.real.rename(old, new)

    def remove(self, path: Path) -> None:
        self.step("remove")
        self.real.remove(path)

    def names(self, folder: Path) -> list[str]:
        return self.real.names(folder)

    def sync_folder(self, folder: Path) -> None:
        self.step("sync_folder")
        self.real.sync_folder(folder)


class FailingWriter:
    def __init__(self, disk: Failing, real: Writer) -> None:
        self.disk, self.real = disk, real

    def write(self, content: Content) -> None:
        self.real.write(memoryview(content)[: len(content) // 2])  # half of it is there when it fails
        self.disk.step("write")
        self.real.write(memoryview(content)[len(content) // 2 :])

    def sync(self) -> None:
        self.disk.step("sync")
        self.real.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.real.__exit__(kind, error, trace)


def part(value: int) -> SnapshotPart:
    return SnapshotPart(f"state {value}".encode(), (torch.full((3,), float(value)), torch.arange(value % 5)))


def save(folder: Path, number: int, shard: int = 0, disk: Disk | None = None) -> None:
    write(folder, number, shard, *part(number * 10 + shard), disk)


def assert_holds(folder: Path, number: int, shard: int = 0) -> None:
    got, expected = read(folder, number, shard), part(number * 10 + shard)
    assert got.state == expected.state
    assert [tensor.tolist() for tensor in got.tensors] == [tensor.tolist() for tensor in expected.tensors]


def names(folder: Path) -> list[str]:
    return LocalDisk().names(folder)


def both(number: int, shard: int = 0) -> list[str]:
    return [f"snapshot-{number:08d}-shard-{shard}.{extension}" for extension in sorted(EXTENSIONS)]


# ---- round trips ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_round_trip_is_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (24 * dtype.itemsize,), dtype=torch.uint8)
    bits = (raw % 2 if dtype is torch.bool else raw).view(dtype)
    tensors = (bits.view(4, 6), bits.view(4, 6).T, bits[:0], bits[3], torch.ones((2, 0)))
    write(tmp_path, 1, 0, b"\x00\xff", tensors)
    got = read(tmp_path, 1, 0)
    assert got.state == b"\x00\xff"
    for mine, its in zip(tensors, got.tensors, strict=True):
        assert (its.dtype, its.shape) == (mine.dtype, mine.shape)
        assert its.contiguous().view(-1).view(torch.uint8).equal(mine.contiguous().view(-1).view(torch.uint8))


def test_others_can_read_it(tmp_path: Path) -> None:
    save(tmp_path, 7)
    file = load_file(tmp_path / "snapshot-00000007-shard-0.safetensors")
    assert {name: tensor.tolist() for name, tensor in file.items()} == {
        "0": [70.0, 70.0, 70.0],
        "1": [],
        "state": list(b"state 70"),
    }


def test_a_whole_snapshot_of_another_version_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on from it says so; a run without it would begin again, and remove it."""
    state = (b"state", (torch.arange(5.0),))
    monkeypatch.setattr(snapshot_module, "VERSION", 2)
    write(tmp_path, 1, 0, *state)
    monkeypatch.undo()
    with pytest.raises(OtherVersion, match="is of version 2 of snapshots, and this program reads version 3"):
        newest_whole(tmp_path, 1)
    write(tmp_path, 2, 0, *state)
    assert newest_whole(tmp_path, 1) == 2


def test_the_newest_two_remain_of_each_shard(tmp_path: Path) -> None:
    save(tmp_path, 1, shard=1)
    for number in (1, 2, 3, 4):
        save(tmp_path, number)
    assert names(tmp_path) == sorted([*both(1, shard=1), *both(3), *both(4)])


def test_the_newest_whole_one_is_that_which_every_shard_has(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "none", 2) is None
    save(tmp_path, 1, shard=0)
    assert newest_whole(tmp_path, 2) is None
    save(tmp_path, 1, shard=1)
    save(tmp_path, 2, shard=1)
    assert newest_whole(tmp_path, 2) == 1, "shard 0 has no part of snapshot 2"
    save(tmp_path, 2, shard=0)
    assert newest_whole(tmp_path, 2) == 2
    (tmp_path / both(2, shard=1)[1]).write_bytes(b"cut")
    assert newest_whole(tmp_path, 2) == 1, "shard 1's part is damaged"


def test_a_course_that_was_given_up_leaves_no_parts(tmp_path: Path) -> None:
    """Shard 0 had written snapshot 2 when all went down; the next snapshot 2 must not be taken for whole with it."""
    for number, shard in [(1, 0), (1, 1), (2, 0)]:
        save(tmp_path, number, shard)
    discard_beyond(tmp_path, newest_whole(tmp_path, 2))
    save(tmp_path, 2, shard=1)
    assert newest_whole(tmp_path, 2) == 1
    discard_beyond(tmp_path, None)
    assert names(tmp_path) == []


# ---- damage ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    save(folder, 3)
    return folder


@pytest.mark.parametrize("name", both(3))
@given(data=st.data())
def test_any_flipped_bit_is_refused_by_name(saved: Path, name: str, data: st.DataObject) -> None:
    file = saved / name
    content = file.read_bytes()
    position, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    file.write_bytes(content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :])
    try:
        with pytest.raises(SnapshotError, match=name):
            read(saved, 3, 0)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("name", both(3))
@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_cut_or_longer_file_is_refused_by_name(saved: Path, name: str, length: int) -> None:
    file = saved / name
    content = file.read_bytes()
    for damaged in (content[:length], content + b"\n"):
        file.write_bytes(damaged)
        try:
            with pytest.raises(SnapshotError, match=name):
                read(saved, 3, 0)
        finally:
            file.write_bytes(content)
    assert_holds(saved, 3)


@pytest.mark.parametrize("name", both(3))
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).unlink()
    with pytest.raises(SnapshotError, match=name):
        read(saved, 3, 0)
    (saved / name).write_bytes(content)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for mine, other in zip(both(3), both(4, shard=1), strict=True):
        (tmp_path / mine).rename(tmp_path / other)
    with pytest.raises(SnapshotError, match=r"shard-1\.json is damaged"):
        read(tmp_path, 4, 1)


# ---- crashes and full disks ----

STEPS = ["create", "write", "write", "write", "write", "sync", "create", "write", "sync", "rename", "rename"]
STEPS += ["sync_folder", "remove", "remove"]


def test_these_are_the_steps_of_writing_when_two_are_there(tmp_path: Path) -> None:
    disk = Failing(0, Crash())
    for number in (1, 2):
        save(tmp_path, number)
    save(tmp_path, 3, disk=disk)
    assert disk.changes == STEPS


@pytest.mark.parametrize("at", range(1, len(STEPS) + 1), ids=lambda at: f"{at}-{STEPS[at - 1]}")
def test_a_crash_at_any_step_leaves_the_previous_one(tmp_path: Path, at: int) -> None:
    for number in (1, 2):
        save(tmp_path, number)
    with pytest.raises(Crash):
        save(tmp_path, 3, disk=Failing(at, Crash(), stays=True))
    manifest_is_in_place = at > STEPS.index("sync_folder")
    assert newest_whole(tmp_path, 1) == (3 if manifest_is_in_place else 2)
    assert_holds(tmp_path, 2)
    save(tmp_path, 4)
    assert newest_whole(tmp_path, 1) == 4
    assert not [name for name in names(tmp_path) if name.endswith(".partial")]


@pytest.mark.parametrize("at", range(1, STEPS.index("remove") + 1), ids=lambda at: f"{at}-{STEPS[at - 1]}")
def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path, at: int) -> None:
    for number in (1, 2):
        save(tmp_path, number)
    before = names(tmp_path)
    with pytest.raises(SnapshotError, match=r"cannot write .*00000003.*No space.*Earlier snapshots are untouched"):
        save(tmp_path, 3, disk=Failing(at, OSError(errno.ENOSPC, "No space left on device")))
    assert names(tmp_path) == before
    assert_holds(tmp_path, 1)
    assert_holds(tmp_path, 2)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot hold torch\.complex64"):
        write(tmp_path, 1, 0, b"", [torch.ones(1, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="snapshot -1 of shard 0"):
        write(tmp_path, -1, 0, b"", [])
    assert names(tmp_path) == []


# ---- in the background ----


class Gated(LocalDisk):
    """The real disk, which begins when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def create(self, path: Path) -> Writer:
        assert self.gate.wait(30)
        return super().create(path)


def test_one_snapshot_is_under_way_and_nobody_waits_for_it(tmp_path: Path) -> None:
    disk = Gated()
    snapshots = SnapshotWriter(tmp_path, 0, disk)
    assert snapshots.poll() is None
    assert snapshots.begin(1, *part(10))
    assert not snapshots.begin(2, *part(20)), "one is under way"
    assert snapshots.poll() is None
    with pytest.raises(TimeoutError, match="shard 0"):
        snapshots.close(0)
    disk.gate.set()
    assert snapshots.close(30) == WrittenSnapshot(1)
    assert snapshots.poll() is None, "said once"
    assert snapshots.begin(2, *part(20))
    assert snapshots.close(30) == WrittenSnapshot(2)
    assert_holds(tmp_path, 1)
    assert_holds(tmp_path, 2)


def test_errors_in_the_background_are_reported(tmp_path: Path) -> None:
    snapshots = SnapshotWriter(tmp_path, 0, Failing(2, OSError(errno.ENOSPC, "No space left on device")))
    assert snapshots.begin(1, *part(10))
    saved = snapshots.close(30)
    assert saved is not None
    assert (saved.number, "No space left" in saved.error) == (1, True)


def test_a_part_that_is_not_finite_is_not_written_and_the_earlier_ones_stay(tmp_path: Path) -> None:
    snapshots = SnapshotWriter(tmp_path, 0)
    for number in (1, 2):
        assert snapshots.begin(number, b"", [torch.ones(3)])
        assert snapshots.close(10.0) == WrittenSnapshot(number)
    for number, value in ((3, math.nan), (4, math.inf)):
        assert snapshots.begin(number, b"", [torch.ones(3), torch.tensor([1.0, value])])
        saved = snapshots.close(10.0)
        assert saved is not None
        assert saved.not_finite is not None
        assert f"element 1 of shard 0, tensor 1 of its state is {value}" in saved.error
    assert newest_whole(tmp_path, 1) == 2
    assert complete(tmp_path, 1, 1)
