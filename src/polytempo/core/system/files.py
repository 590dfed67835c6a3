"""Files of a run's folder. No link in it is followed: its target belongs to others.

    runs/digits/            the folder itself may be a link: the user named it
      checkpoint/, logs/    made by us; a link of that name is refused
      result.json           written aside and moved into place; a link of either name is replaced, not followed

Failures raise OSError that names the path, except in `parsed`. A `UrlPath` has neither folders nor links: there is
nothing to make, and an object appears whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from polytempo.core.calls.refusals import refusal_of
from polytempo.core.system.descriptors import open_descriptor
from polytempo.core.system.url_path import P, Place, UrlPath

MAX_JSON_BYTES = 1 << 30
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
"""The files of a run's stream: rows, and other records."""
STATUS, RESULT = "live.json", "result.json"
"""The status of a run that goes on, and its result."""
TAILS, TAIL = ".tails", re.compile(r"\d{1,3}\.json")
"""The folder of the last operations of each rank, while a run goes on, and the names of its files."""
FOLDERS = ("checkpoint", "logs", "record", "images")
"""The folders that a run makes in its own."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCKED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a file that may not be written. `FULL`: of a full disk, and of a user's full share of it."""

_CLOSED = os.O_CLOEXEC | os.O_NOFOLLOW


def run_folder(out: P) -> P:
    """Make a run's folder. Refuses a folder with a link or a file in place of a run's subfolder."""
    if isinstance(out, UrlPath):
        return out
    out.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        _check_free(out / name)
    return out


def remove_tails(out: Place) -> None:
    """Remove the tails in a run's folder. Files of other names stay there, and so do tails that cannot be removed."""
    tails = out / TAILS
    if isinstance(tails, UrlPath) or not is_folder(tails):
        return
    with suppress(OSError):
        for name in os.listdir(tails):
            if TAIL.fullmatch(name.removesuffix(".tmp")):
                (tails / name).unlink(missing_ok=True)
        tails.rmdir()


def made(folder: P) -> P:
    """Make `folder` where it is not there; a link or a file of that name is refused."""
    if isinstance(folder, UrlPath):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir()
    _check_free(folder)
    return folder


def is_folder(path: Path) -> bool:
    """True if `path` is a folder itself, not a link to a folder."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def create(path: Path) -> BinaryIO:
    """A new, empty file in place of a file or link of that name; a link's target stays."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSED
    with suppress(FileNotFoundError):
        path.unlink()
    return open(open_descriptor(path, flags, 0o666), "wb", buffering=0)


def replace(path: Place, content: str | bytes) -> None:
    """Write `path`, complete or not at all."""
    with aside(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def problem(error: Exception, path: Place) -> str:
    """The cause and the remedy of a write to `path` that failed with `error`; a full disk has a code."""
    number = _number(error)
    return f"{os.strerror(number) if number in FULL else error}; {remedy(error, path)}"


def remedy(error: Exception, path: Place) -> str:
    """The remedy of a write to `path` that failed with `error`."""
    number = _number(error)
    if number in _LOCKED:
        return "let this process write there"
    if number == errno.EFBIG:
        return "let its files be larger (ulimit -f)"
    if number not in FULL:
        return "see that it answers"
    row = refusal_of({"file", "full disk"})
    assert row is not None
    return f"{row.code}: {row.why}; {row.remedy}".format(path=path, room=_room(path, number))


def _number(error: Exception) -> int:
    """The number of an OSError; others have it in their text, or are 0."""
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])
    return number or 0


def _room(path: Place, number: int) -> str:
    """The free bytes of the disk of `path`, where a write failed with this number."""
    if number == errno.EDQUOT:
        return "your share of its disk is used up"
    if isinstance(path, Path):
        with suppress(OSError):
            disk = shutil.disk_usage(next(each for each in (path, *path.absolute().parents) if each.exists()))
            return f"{disk.free:,} of {disk.total:,} bytes of its disk are free"
    return "its disk is full"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A write that fails inside names `path`, and where the disk is full the remedy."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        then = f"; {remedy(error, path)}, then go on with --resume" if error.errno in FULL else ""
        raise OSError(error.errno, f"{os.strerror(error.errno)}{then}", str(path)) from error


def write(stream: BinaryIO, content: bytes | bytearray, path: Path) -> None:
    """Write all of `content` to the unbuffered `stream` of `path`."""
    rest = memoryview(content)
    with named(path):
        while rest:
            rest = rest[stream.write(rest) :]


@contextmanager
def aside(path: Place) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` in the end; after an error `path` is as it was."""
    if isinstance(path, UrlPath):
        content = BytesIO()
        yield content
        path.write(content.getvalue())
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with named(path), create(temporary) as raw, open(raw.fileno(), "wb", closefd=False) as stream:
            yield stream
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(path: Path) -> BinaryIO:
    """`path`, to write at its end."""
    return open(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _CLOSED, 0o666), "wb", buffering=0)


def opened(path: Path) -> BufferedReader:
    """`path` to read from. Neither a link nor a device nor a pipe, which would wait for its writer for ever."""
    descriptor = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | _CLOSED)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is not a plain file", str(path))
    return open(descriptor, "rb")


def read(path: Place, most_bytes: int) -> bytes:
    """The first `most_bytes` of `path`."""
    if isinstance(path, UrlPath):
        return path.read(most_bytes)
    with opened(path) as stream:
        return stream.read(most_bytes)


def parsed(path: Place, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON in `path`. ValueError names the file where it is too large, too deep or not JSON, or not a plain
    file."""
    try:
        content = read(path, most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        return json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} cannot be read as JSON: {reason}; no run has written it") from error


def remove(path: Place) -> None:
    """Remove a file, a link, or a folder with all its content; targets of links stay."""
    if isinstance(path, UrlPath):
        path.remove()
    elif is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_free(path: Path) -> None:
    if os.path.lexists(path) and not is_folder(path):
        what = "a link" if path.is_symlink() else "no folder"
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"this is {what}, and nothing in a run's folder is followed; remove it, or choose another folder",
            str(path),
        )
