"""The place of a run's files: never over another run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytempo.cli.options.folder import checked_folder, default_folder
from polytempo.runs.frame.folder_names import slug


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sync_sgd", "sync_sgd"),
        ("local_sgd(period=8)", "local_sgd-period-8"),
        ("a(b=0.5, c=d(e=1))", "a-b-0.5-c-d-e-1"),
        ("../x", "x"),
        ("()", "run"),
    ],
)
def test_slugs(text: str, part: str) -> None:
    """Letters, digits, dots and underscores; never a way out of the folder."""
    assert slug(text) == part


def leave_run(folder: Path, name: str = "result.json") -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text("{}", encoding="utf-8")


def test_the_default_folder_is_the_first_free_one(tmp_path: Path) -> None:
    """Finished runs and interrupted ones keep theirs; an empty folder is free."""
    assert default_folder("digits", resume=False, parent=tmp_path) == tmp_path / "digits"
    leave_run(tmp_path / "digits")
    assert default_folder("digits", resume=False, parent=tmp_path) == tmp_path / "digits-2"
    leave_run(tmp_path / "digits-2", "metrics.jsonl")
    (tmp_path / "digits-3").mkdir()
    (tmp_path / "digits-3" / "notes.txt").write_text("mine")
    assert default_folder("digits", resume=False, parent=tmp_path) == tmp_path / "digits-4"
    assert default_folder("digits", resume=True, parent=tmp_path) == tmp_path / "digits-2"
    (tmp_path / "digits-3" / "notes.txt").unlink()
    assert default_folder("digits", resume=False, parent=tmp_path) == tmp_path / "digits-3"


def test_resume_takes_the_last_run(tmp_path: Path) -> None:
    """The one with the highest number; an error where there is none."""
    with pytest.raises(ValueError, match="digits holds no run"):
        default_folder("digits", resume=True, parent=tmp_path)
    leave_run(tmp_path / "digits")
    leave_run(tmp_path / "digits-2")
    assert default_folder("digits", resume=True, parent=tmp_path) == tmp_path / "digits-2"


def test_a_named_folder_is_not_overwritten(tmp_path: Path) -> None:
    """Unless its run is resumed."""
    free, taken, file = tmp_path / "free", tmp_path / "taken", tmp_path / "file"
    leave_run(taken)
    file.write_text("", encoding="utf-8")
    assert checked_folder(free, resume=False) == free
    assert checked_folder(taken, resume=True) == taken
    with pytest.raises(ValueError, match="this folder holds a run; continue it with --resume, or name another folder"):
        checked_folder(taken, resume=False)
    with pytest.raises(ValueError, match="this is a file; name a folder"):
        checked_folder(file, resume=False)


def test_a_folder_with_others_files_is_only_written_into_by_force(tmp_path: Path) -> None:
    """Also on a resume, which finds no run there; an empty folder is free."""
    mine = tmp_path / "mine"
    mine.mkdir()
    assert checked_folder(mine, resume=False) == mine
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (mine / name).write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"this folder holds other files \(a.txt, b.txt, c.txt, …\).*--force"):
            checked_folder(mine, resume=resume)
    assert checked_folder(mine, resume=False, force=True) == mine
    leave_run(mine / "run")
    with pytest.raises(ValueError, match="this folder holds a run"):
        checked_folder(mine / "run", resume=False, force=True)
