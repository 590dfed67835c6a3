"""Checkpoints and snapshots in an object store: after any last write an earlier one is read unchanged."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from object_store import Store, bucket
from polytempo.core.system.url_path import UrlPath
from polytempo.server.snapshots import snapshot
from polytempo.server.snapshots.snapshot import SnapshotError, complete, discard_beyond, newest_whole
from polytempo.training.checkpoint.checkpoint_files import (
    CheckpointPart,
    commit,
    newest_undamaged,
    read_manifest,
    read_part,
    write_part,
)
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest

RANKS = 2


@pytest.fixture
def root(tmp_path: Path) -> Iterator[UrlPath]:
    """A store that works again afterwards."""
    yield UrlPath(bucket(tmp_path)) / "checkpoint"
    Store.fails_at = None


def part(value: float) -> CheckpointPart:
    return CheckpointPart({"w": torch.full((3,), value), "n": torch.tensor(7)}, {"seconds": value})


def save(root: UrlPath | Path, step: int, value: float) -> None:
    hashes = [write_part(root, step, rank, part(value + rank)) for rank in range(RANKS)]
    commit(root, step, hashes, {"strategy": "sync_sgd()"})


def loaded(root: UrlPath) -> tuple[int, float]:
    """Step and value of the newest checkpoint, with every part read."""
    folder = latest(root)
    assert folder is not None
    parts = [read_part(folder, rank) for rank in range(RANKS)]
    value = float(parts[0].tensors["w"][0])
    for rank in range(RANKS):
        assert parts[rank].tensors["w"].tolist() == [value + rank] * 3
        assert parts[rank].scalars == {"seconds": value + rank}
    return read_manifest(folder).step, value


def test_the_newest_two_remain_and_hold_the_bytes_of_local_ones(root: UrlPath, tmp_path: Path) -> None:
    assert latest(root) is None
    for step in (10, 20, 30):
        save(root, step, float(step))
        save(tmp_path / "local", step, float(step))
    assert loaded(root) == (30, 30.0)
    assert root.names() == ["step-00000020", "step-00000030"]
    folder, local = root / "step-00000030", tmp_path / "local" / "step-00000030"
    assert (folder / "manifest.json").read(10_000) == (local / "manifest.json").read_bytes()
    parts = [(folder / name).read(10_000) for name in folder.names() if name != "manifest.json"]
    assert parts == [(local / f"rank-{rank}.safetensors").read_bytes() for rank in range(RANKS)]


def test_a_copy_in_a_folder_is_read_like_a_local_one(root: UrlPath, tmp_path: Path) -> None:
    save(root, 10, 4.0)
    local = tmp_path / "copied" / "step-00000010"
    local.mkdir(parents=True)
    for name in (root / "step-00000010").names():
        (root / "step-00000010" / name).download(local / name)
    assert latest(local.parent) == local
    assert read_part(local, 1).scalars == {"seconds": 5.0}


def test_what_lies_beyond_a_step_that_is_saved_again_goes(root: UrlPath) -> None:
    for step in (10, 20, 30):
        save(root, step, float(step))
    write_part(root, 40, 0, part(40.0))  # by a rank that is ahead
    save(root, 20, 21.0)
    assert loaded(root) == (20, 21.0)
    assert root.names() == ["step-00000020", "step-00000040"]
    assert len((root / "step-00000020").names()) == RANKS + 1


def failing_at_each(tmp_path: Path, change: Callable[[], None], *errors: type[Exception]) -> Iterator[tuple[int, bool]]:
    """Make the change of the same objects with a failure of the first operation, of the second, …, at last of none.

    Each time: the operation's number, and true if the change has raised one of `errors`.
    """
    objects, before = tmp_path / "objects", tmp_path / "before"
    shutil.copytree(objects, before)
    for n in itertools.count(1):
        shutil.rmtree(objects)
        shutil.copytree(before, objects)
        Store.operations, Store.fails_at, failed = 0, n, False
        try:
            change()
        except errors:
            failed = True
        untouched, Store.fails_at = Store.operations < n, None
        yield n, failed
        if untouched:
            return


@pytest.mark.parametrize("step", [20, 30], ids=["the same step again", "the next step"])
def test_a_save_that_fails_at_any_operation_leaves_the_former_one(root: UrlPath, tmp_path: Path, step: int) -> None:
    save(root, 10, 10.0)
    save(root, 20, 20.0)
    outcomes = set()
    for n, failed in failing_at_each(tmp_path, lambda: save(root, step, 99.0), CheckpointError):
        assert loaded(root) == ((20, 20.0) if failed else (step, 99.0)), n
        outcomes.add(failed)
        save(root, 40, 40.0)  # and the run that goes on leaves no remains
        assert loaded(root) == (40, 40.0)
        assert all(len((root / name).names()) == RANKS + 1 for name in root.names())
    assert outcomes == {True, False}
    assert n > 8


@pytest.mark.parametrize("name", ["manifest.json", "rank-1"])
def test_damage_is_named(root: UrlPath, name: str) -> None:
    save(root, 10, 10.0)
    save(root, 20, 20.0)
    folder = root / "step-00000020"
    [found] = [folder / each for each in folder.names() if each.startswith(name)]
    content = found.read(100_000)
    found.write(content[:50] + b"x" + content[51:])
    with pytest.raises(CheckpointError, match=r"step-00000020 to fall back to bucket://.*step-00000010"):
        loaded(root)
    found.write(content[:-9])
    if name == "manifest.json":  # cut short, as a filesystem may leave it: it was never complete
        assert loaded(root) == (10, 10.0)
    else:
        with pytest.raises(CheckpointError, match="has 0 bytes instead of"):
            loaded(root)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
@pytest.mark.parametrize("name", ["manifest.json", "rank-1"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    root: UrlPath, tmp_path: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where: UrlPath | Path = root if kind == "bucket" else tmp_path / "checkpoint"
    for step in (10, 20):
        save(where, step, float(step))
    for last, before in ((20, 10), (10, None)):
        folder = where / f"step-{last:08d}"
        [found] = [each for each in folder.iterdir() if each.name.startswith(name)]
        content = found.read(100_000) if isinstance(found, UrlPath) else found.read_bytes()
        harmed = content[:50] + b"x" + content[51:] if name == "manifest.json" else content[:-9]
        _ = found.write(harmed) if isinstance(found, UrlPath) else found.write_bytes(harmed)
        if before is None:  # the rest stays for inspection
            with pytest.raises(CheckpointError, match="there is no earlier checkpoint"):
                newest_undamaged(where)
            assert latest(where) == folder
        else:
            assert newest_undamaged(where) == where / f"step-{before:08d}"
            assert latest(where) == where / f"step-{before:08d}"
            assert str(found.parent) in capsys.readouterr().err
            assert any(
                each.name.endswith(".damaged")
                for each in [*where.iterdir(), *(folder.iterdir() if folder.is_dir() else [])]
            )
    assert newest_undamaged(tmp_path / "empty") is None


# ---- snapshots of shards ----


def write(folder: UrlPath, number: int, value: int) -> None:
    for shard in range(2):
        snapshot.write(folder, number, shard, bytes([value]), [torch.full((4,), float(value))])


def test_a_snapshot_that_fails_at_any_operation_leaves_the_former_one(root: UrlPath, tmp_path: Path) -> None:
    write(root, 1, 1)
    write(root, 2, 2)
    numbers = set()
    for n, failed in failing_at_each(tmp_path, lambda: write(root, 3, 3), SnapshotError, OSError):
        number = newest_whole(root, 2)
        assert number == 3 or (failed and number == 2), n  # the object written before the failed answer is there
        numbers.add(number)
        for shard in range(2):
            found = snapshot.read(root, number, shard)
            assert (found.state, found.tensors[0].tolist()) == (bytes([number]), [float(number)] * 4)
    assert numbers == {2, 3}
    discard_beyond(root, 2)
    assert not complete(root, 3, 2)
    assert newest_whole(root, 2) == 2
    assert not any(name.endswith(".partial") for name in root.names())
