"""The folders of checkpoints: their names, their completeness, and their removal.

step-00000100/            complete: renamed into place only after everything in it was on the disk
.step-00000120.partial/   being written; a crash leaves it behind, the next commit removes it
.step-00000100.replaced/  the old version of a step that is being saved again
.step-00000080.removed/   out of date: it loses its name before its files

`checkpoint_objects` finds complete checkpoints under a URL.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.core.system import files
from polytempo.core.system.url_path import P, Place, UrlPath
from polytempo.training.checkpoint.checkpoint_objects import complete_steps, prune_objects
from polytempo.training.checkpoint.manifest import BY_CONTENT, COMPLETE, KEPT, LEFTOVER, MANIFEST, MAX_MANIFEST_BYTES

SERVED_MODEL = "model.safetensors"
"""A folder with this file has snapshots of a run with a parameter server (see `training.served.served_model`)."""
_TRIES = 100

_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced")


class CheckpointError(PolytempoError):
    """A checkpoint cannot be written, or the files on the disk have changed."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not as it was written; `problem` says which file and why."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}; {remedy}")


def latest(root: Place) -> Place | None:
    """The folder of the newest complete checkpoint, or None where there is none."""
    folders = complete_in(root)
    return folders[max(folders)] if folders else None


def set_aside(folder: Place) -> Place:
    """Rename a damaged checkpoint, so that it does not count, and return its new name."""
    if isinstance(folder, UrlPath):
        manifest, aside = folder / MANIFEST, folder / f"{MANIFEST}.damaged"
        aside.write(manifest.read(MAX_MANIFEST_BYTES))
        manifest.remove()
        return aside
    aside_folder = folder.with_name(f"{folder.name}.damaged")
    files.remove(aside_folder)
    os.rename(folder, aside_folder)
    return aside_folder


def partial_folder(root: P, step: int) -> P:
    """The folder of a checkpoint's parts until it is complete."""
    if step < 0:
        raise ValueError(f"step {step} is negative; steps count from 0")
    return root / f".step-{step:08d}.partial"


def final_folder(root: P, step: int) -> P:
    """The folder of a complete checkpoint."""
    return root / f"step-{step:08d}"


def complete_in(root: Place) -> Mapping[int, Place]:
    """Complete checkpoints by step."""
    return complete_steps(root) if isinstance(root, UrlPath) else _complete(root)


def _complete(root: Path) -> dict[int, Path]:
    """Complete checkpoints by step. An old version counts while its new one is not yet in place."""
    found: dict[int, Path] = {}
    for pattern in (_REPLACED, COMPLETE):
        for folder in _within(root):
            if (match := pattern.fullmatch(folder.name)) and files.is_folder(folder) and not _lacks_manifest(folder):
                found[int(match[1])] = folder
    return found


def _lacks_manifest(folder: Path) -> bool:
    """True if another host was putting parts into it (see `checkpoint_objects`) and has not come to the end."""
    by_content = any(BY_CONTENT.fullmatch(entry.name) for entry in folder.iterdir())
    return by_content and not os.path.lexists(folder / MANIFEST)


def _within(root: Path) -> list[Path]:
    """Entries of `root`, links as links; none without a `root`."""
    if root.is_symlink():
        raise CheckpointError(f"{root} is a link, and nothing in a run's folder is followed; move the folder here")
    return list(root.iterdir()) if root.is_dir() else []


def make_partial(folder: Path) -> None:
    """Make the folder, in place of any other file of its name; all ranks may do so at the same time."""
    files.made(folder.parent)
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            folder.mkdir()
        if files.is_folder(folder):
            return
        with suppress(IsADirectoryError):  # another rank has made the folder meanwhile
            folder.unlink(missing_ok=True)
    raise FileExistsError(errno.EEXIST, "something makes files of this name again and again", str(folder))


def move_into_place(folder: Path, final: Path) -> None:
    """Make `folder` the complete checkpoint `final`, in place of an older version."""
    replaced = final.with_name(f".{final.name}.replaced")
    if os.path.lexists(final):
        files.remove(replaced)
        os.rename(final, replaced)
    os.rename(folder, final)


def prune(root: Place, step: int) -> None:
    """Remove leftovers and old checkpoints after the complete checkpoint `step`.

    Leftovers go first; a complete folder loses its name before its files. A failed removal does no harm: the next save
    tries again.
    """
    if isinstance(root, UrlPath):
        with suppress(OSError):
            prune_objects(root, step)
        return
    complete = _complete(root)
    for folder in _within(root):
        match = LEFTOVER.fullmatch(folder.name)
        if match and folder not in complete.values() and (match[2] != "partial" or int(match[1]) <= step):
            with suppress(OSError):
                files.remove(folder)
    kept = sorted((other for other in complete if other <= step), reverse=True)[:KEPT]
    for other in complete.keys() - kept:
        removed = root / f".step-{other:08d}.removed"
        with suppress(OSError):
            os.rename(complete[other], removed)
            files.remove(removed)
    for other in kept:
        if complete[other] != final_folder(root, other):  # its new version never came
            with suppress(OSError):
                os.rename(complete[other], final_folder(root, other))


def still_there(root: Place) -> str:
    """A sentence for an error: the checkpoint that a run can go on from."""
    try:
        previous = latest(root)
    except OSError as error:
        return f"Whether there is an earlier checkpoint cannot be seen ({error})."
    return f"The checkpoint {previous} is untouched." if previous else "There is no earlier checkpoint."


def damaged(path: Place, file: Place, problem: str) -> DamagedCheckpoint:
    """The error for a `file` of checkpoint `path` that has changed, with a remedy."""
    match = COMPLETE.fullmatch(path.name)
    step = int(match[1]) if match else 0
    earlier = {other: folder for other, folder in complete_in(path.parent).items() if other < step}
    if earlier:
        remedy = f"delete {path} to fall back to {earlier[max(earlier)]}"
    else:
        remedy = f"there is no earlier checkpoint; delete {path} and start again"
    return DamagedCheckpoint(f"{file} {problem}", remedy)
