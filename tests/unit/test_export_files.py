"""The files of the callback `export`: their names, their places, and the note of a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from polytempo.spec.callbacks.callback import CallbackFacts
from polytempo.spec.callbacks.export import Export, export
from polytempo.training.observe import whole_checkpoint

LOSSES = {10: 0.5, 20: 0.25, 30: 0.75}


@pytest.fixture(autouse=True)
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that find no room; others get the checkpoint's name."""
    names: set[str] = set()

    def write(path: Path, file: Path) -> None:
        if file.name in names:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path.name)

    monkeypatch.setattr(whole_checkpoint, "export_checkpoint", write)
    return names


def begun(callback: Export, out: Path, state: dict[str, Any] | None = None) -> Export:
    callback.on_start(CallbackFacts(out=str(out)))
    if state is not None:
        callback.load_state_dict(json.loads(json.dumps(state)))
    return callback


def evaluated(callback: Export, out: Path, step: int) -> None:
    saved = out / "checkpoint" / f"step-{step:08d}"
    facts = {"step": step, "epoch": step / 10, "out": str(out)}
    if callback.on_evaluation(CallbackFacts(values={"loss": LOSSES[step]}, **facts)).save:  # type: ignore[arg-type]
        saved.mkdir(parents=True, exist_ok=True)
        callback.on_checkpoint(CallbackFacts(checkpoint=str(saved), **facts))  # type: ignore[arg-type]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_absolute_place_is_taken_and_has_the_best(tmp_path: Path) -> None:
    out, to = tmp_path / "run", tmp_path / "models"
    callback = begun(export(to=f"{to}/{{step}}-{{epoch:.1f}}-{{loss:.2f}}.safetensors"), out)
    assert names(to) == set(), "the folder is made before the first step"
    for step in LOSSES:
        evaluated(callback, out, step)
    assert names(to) == {"20-2.0-0.25.safetensors"}


def test_a_resumed_export_removes_the_file_of_an_earlier_part(tmp_path: Path) -> None:
    first = begun(export(to="models/{step}-{loss}.safetensors"), tmp_path)
    evaluated(first, tmp_path, 10)
    assert names(tmp_path / "models") == {"10-0.5.safetensors"}
    second = begun(export(to="models/{step}-{loss}.safetensors"), tmp_path, first.state_dict())
    evaluated(second, tmp_path, 20)
    assert names(tmp_path / "models") == {"20-0.25.safetensors"}


def test_a_loss_that_is_no_number_comes_back(tmp_path: Path) -> None:
    first = begun(export(best=0, every=1, to="{step}-{loss}.safetensors"), tmp_path)
    first.on_evaluation(CallbackFacts(step=10, values={"loss": None}))
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    assert begun(export(best=0, every=1, to="{step}-{loss}.safetensors"), tmp_path, state).state_dict() == state


@pytest.mark.parametrize("files", [[[10, "../victim"]], [[10, "0.5", "../victim"]]])
def test_a_state_names_no_file(files: list[Any], tmp_path: Path) -> None:
    """A checkpoint may come from others: it says numbers, and `to` says where files are."""
    out, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("precious")
    callback = begun(export(to="{step}-{loss}.safetensors"), out)
    forged = {"evaluations": 1, "files": files, "numbers": files, "regular": [], "scores": [[10, 0.5]]}
    with pytest.raises(ValueError, match="victim"):
        callback.load_state_dict(forged)
    evaluated(callback, out, 20)
    assert victim.read_text() == "precious"


def test_a_full_disk_is_a_note_and_later_files_are_written(
    full: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = begun(export(best=0, every=1), tmp_path)
    full.update({"step-10.safetensors", "step-20.safetensors"})
    evaluated(callback, tmp_path, 10)
    evaluated(callback, tmp_path, 20)
    assert names(tmp_path / "exports") == set()
    full.clear()
    evaluated(callback, tmp_path, 30)
    assert names(tmp_path / "exports") == {"step-10.safetensors", "step-20.safetensors", "step-30.safetensors"}
    said = capsys.readouterr().err
    assert said.count("PT3001") == said.count("the run goes on") == 1
    assert "step-10.safetensors" in said


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "exports").write_text("a file")
    with pytest.raises(ValueError, match=r"exports/step-\{step\}"):
        begun(export(), tmp_path)


def test_a_folder_without_permission_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="let this process write there"):
        begun(export(), tmp_path)
