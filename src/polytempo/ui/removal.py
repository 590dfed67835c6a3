"""Removal of runs: delete a run's folder, or move it to the archive. Only runs below the root, and only ended ones."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from polytempo.core.system.files import is_folder
from polytempo.ui.run_list import ARCHIVE, FILES, facts_of, owner_lives


def remove(root: Path, name: str) -> None:
    """Delete the run `name` below `root`. ValueError for a folder that is not an ended run's, which stays as it is."""
    folder = _checked(root, name)
    aside = folder.with_name(f".removed-{secrets.token_hex(6)}")
    folder.rename(aside)  # whole or not: a reader sees no half of a run
    shutil.rmtree(aside)


def archive(root: Path, name: str) -> Path:
    """Move the run `name` to `archived/` below `root`, where lists leave it out; the new folder. Errors as `remove`."""
    folder = _checked(root, name)
    home = root / ARCHIVE / Path(name).parent
    _make(root, home)
    target = home / folder.name
    number = 1
    while target.exists():
        number += 1
        target = home / f"{folder.name}-{number}"
    folder.rename(target)
    return target


def run_below(root: Path, name: str) -> Path:
    """The folder of a run below `root`. Each part of its path is a folder itself, and not a link."""
    parts = name.split("/")
    if name == "." or not all(parts) or any(part in (".", "..") or "\0" in part for part in parts) or "\\" in name:
        raise ValueError(f"{name!r} is not a run below {root}, so it stays")
    folder = root
    for part in parts:
        folder = folder / part
        if not is_folder(folder):
            raise ValueError(f"{name!r}: {part!r} is not a folder, or is a link, so it stays")
    if not any((folder / each).is_file() for each in FILES):
        raise ValueError(f"{name!r} is not the folder of a run, so it stays")
    return folder


def _checked(root: Path, name: str) -> Path:
    """The folder of an ended run below `root`."""
    folder = run_below(root, name)
    if any(is_folder(inner) and any((inner / each).is_file() for each in FILES) for inner in folder.iterdir()):
        raise ValueError(f"{name!r} holds other runs, so it stays; remove them first")
    if owner_lives(folder) is not False:
        raise ValueError(f"{name!r} is held by a run that goes on, so it stays; stop that run first")
    try:
        state = facts_of(folder)["state"]
    except (ValueError, OSError, RecursionError):
        state = "unknown"
    if state == "running":
        raise ValueError(f"{name!r} is running, so it stays; stop that run first")
    return folder


def _make(root: Path, home: Path) -> None:
    """Make the folders between `root` and `home`. ValueError where a link is in the way."""
    folder = root
    for part in home.relative_to(root).parts:
        folder = folder / part
        if not os.path.lexists(folder):
            folder.mkdir()
        if not is_folder(folder):
            raise ValueError(f"{folder} is not a folder, or is a link; move it away")
