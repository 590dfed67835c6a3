"""Logs of a run's processes: their names, and the last lines that hold a text."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.spec.text.plain_text import plain_text

MOST_LINES = 400
_MOST_LOGS, _MOST_LETTERS, _MOST_BYTES = 512, 2_000, 4 << 20


def logs_of(folder: Place) -> list[dict[str, Any]]:
    """Name and bytes of each log, in order. Links are left out."""
    home = folder / "logs"
    if isinstance(home, UrlPath):
        return [{"name": name, "bytes": (home / name).size()} for name in home.names()[:_MOST_LOGS]]
    found = []
    with suppress(OSError), os.scandir(home) as entries:
        for entry in entries:
            if files.is_folder(home) and entry.is_file(follow_symlinks=False):
                found.append({"name": entry.name, "bytes": entry.stat(follow_symlinks=False).st_size})
    return sorted(found, key=lambda log: str(log["name"]))[:_MOST_LOGS]


def log_lines(folder: Place, name: str, search: str = "") -> dict[str, Any]:
    """The last lines of a log that hold `search`, in any case, with their numbers; 400 of its last 4 MiB at most.

    ValueError if the run has no log of that name.
    """
    known = {str(log["name"]): int(log["bytes"]) for log in logs_of(folder)}
    if name not in known:
        raise ValueError(f"{name!r} is not a log of this run; it has {', '.join(known) or 'none'}")
    content, whole = _end_of(folder / "logs" / name, known[name])
    lines = content.decode("utf-8", "replace").splitlines()
    if not whole:
        lines = lines[1:]
    numbered = [(number, plain_text(line[:_MOST_LETTERS])) for number, line in enumerate(lines, 1)]
    found = [each for each in numbered if search.lower() in each[1].lower()] if search else numbered
    return {
        "name": name,
        "bytes": known[name],
        "whole": whole,
        "found": len(found),
        "lines": [[number if whole else None, line] for number, line in found[-MOST_LINES:]],
    }


def _end_of(path: Place, size: int) -> tuple[bytes, bool]:
    """The last bytes of a file, and True if they are all."""
    if isinstance(path, UrlPath):
        return path.read(size)[-_MOST_BYTES:], size <= _MOST_BYTES
    with files.opened(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _MOST_BYTES))
        return stream.read(_MOST_BYTES), size <= _MOST_BYTES
