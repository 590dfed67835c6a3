"""Finds a job's files by the argument `--data`."""

from __future__ import annotations

from pathlib import Path


def folder_of(given: Path | None, job: str, expected: str) -> Path:
    """The folder given as `--data`. Raises ValueError, naming the expected files."""
    if given is None:
        raise ValueError(f"job {job} needs --data FOLDER, a folder with {expected}")
    if not given.is_dir():
        raise ValueError(f"job {job}: --data {given} is not a folder; expected one with {expected}")
    return given


def file_of(given: Path | None, job: str, name: str) -> Path:
    """The file given as `--data`, or the file `name` in that folder. Raises ValueError where there is none."""
    if given is None:
        raise ValueError(f"job {job} needs --data PATH, a file or a folder with {name}")
    path = given / name if given.is_dir() else given
    if not path.is_file():
        raise ValueError(f"job {job}: there is no file {path}; --data takes a file or a folder with {name}")
    return path
