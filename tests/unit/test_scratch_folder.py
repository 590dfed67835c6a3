"""Temporary files of a process that SIGKILL ends: the next process of this user removes them, and no living one's."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from object_store import bucket
from polytempo.core.system.scratch_folder import ScratchFolder
from polytempo.core.system.url_path import UrlPath
from polytempo.engines.processes.fork import fork
from polytempo.horovod.runtime import link
from polytempo.server.snapshots.disk import ObjectDisk
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, read_part, write_part

Pause = Callable[[], None]


def folders(parent: Path) -> set[Path]:
    return set(parent.glob("polytempo-*"))


def killed_in(work: Callable[[Pause], object]) -> None:
    """Run `work` in a new process, which SIGKILL ends where it pauses."""
    arrived, arrives = os.pipe()
    never = os.pipe()

    def pause() -> None:
        os.write(arrives, b"x")
        os.read(never[0], 1)

    child = fork(lambda: (work(pause), os._exit(0))[1])
    assert os.read(arrived, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for descriptor in (arrived, arrives, *never):
        os.close(descriptor)


def sends_snapshot(url: UrlPath, pause: Pause) -> None:
    disk = ObjectDisk()
    with disk.create(url / "snapshot") as writer:
        writer.write(b"content")
        pause()


def sends_checkpoint(url: UrlPath, pause: Pause) -> None:
    UrlPath.upload = lambda *_: pause()  # type: ignore[method-assign] # the process ends here
    write_part(url, 1, 0, CheckpointPart({"w": torch.zeros(3)}, {}))


def fetches_checkpoint(url: UrlPath, pause: Pause) -> None:
    whole = commit(url, 1, [write_part(url, 1, 0, CheckpointPart({"w": torch.zeros(3)}, {}))], {})
    UrlPath.download = lambda *_: pause()  # type: ignore[method-assign] # the process ends here
    read_part(whole, 0)


def meets_ranks(_: UrlPath, pause: Pause) -> None:
    with ExitStack() as listening:
        link._listening("", 2, listening)
        pause()


@pytest.mark.parametrize("work", [sends_snapshot, sends_checkpoint, fetches_checkpoint, meets_ranks])
def test_the_next_process_removes_what_a_killed_one_has_left(
    work: Callable[[UrlPath, Pause], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    url = UrlPath(bucket(tmp_path))
    living = ScratchFolder()
    killed_in(lambda pause: work(url, pause))
    (left,) = folders(temporary) - {living.path}
    with ScratchFolder() as mine:
        assert folders(temporary) == {living.path, mine.path}, f"{left} is removed, and no living process's folder"
        assert mine.path.stat().st_mode & 0o777 == 0o700
    living.close()
    assert not folders(temporary)


def test_a_forked_process_does_not_remove_its_parents_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ScratchFolder() as mine:
        os.waitpid(fork(mine.close), 0)
        assert mine.path.is_dir()
    assert not folders(tmp_path)


def test_links_and_other_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kept").mkdir()
    link_to_kept = tmp_path / f"polytempo-scratch-{'0' * 16}"
    link_to_kept.symlink_to(tmp_path / "kept")
    file = tmp_path / f"polytempo-scratch-{'1' * 16}"
    file.touch()
    ScratchFolder().close()
    assert folders(tmp_path) == {link_to_kept, file}
    assert (tmp_path / "kept").is_dir()
