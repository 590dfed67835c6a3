"""`Disk`: the few things that snapshots ask of a file system, so that a simulated one can fail at each of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from polytempo.core import files

Content = bytes | bytearray | memoryview


class Writer(Protocol):
    """A file that is being written, from its first byte on."""

    def write(self, content: Content) -> None:
        """All of `content` behind what is there. OSError where the disk is full."""

    def sync(self) -> None:
        """What was written is on the disk when this returns."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Disk(Protocol):
    """Files in folders. Whatever cannot be done raises OSError."""

    def create(self, path: Path) -> Writer:
        """A new, empty file; its folder is made if there is none, and what had the name is gone."""

    def read(self, path: Path, most_bytes: int) -> bytes:
        """The file's content, but no more than its first `most_bytes`."""

    def size(self, path: Path) -> int:
        """The file's length in bytes."""

    def rename(self, old: Path, new: Path) -> None:
        """`new` is from now on what `old` was; at no time is there no `new`, if there was one."""

    def remove(self, path: Path) -> None:
        """The file is gone."""

    def names(self, folder: Path) -> list[str]:
        """What the folder holds, sorted; nothing where there is none."""

    def sync_folder(self, folder: Path) -> None:
        """The folder's names are on the disk when this returns."""


class LocalDisk:
    """The machine's own file system. No link is followed (see `core.files`)."""

    def create(self, path: Path) -> Writer:
        """See `Disk`."""
        files.made(path.parent)
        return _LocalWriter(path)

    def read(self, path: Path, most_bytes: int) -> bytes:
        """See `Disk`."""
        return files.read(path, most_bytes)

    def size(self, path: Path) -> int:
        """See `Disk`."""
        with files.opened(path) as stream:
            return os.fstat(stream.fileno()).st_size

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        files.remove(path)

    def names(self, folder: Path) -> list[str]:
        """See `Disk`."""
        return sorted(os.listdir(files.made(folder))) if os.path.lexists(folder) else []

    def sync_folder(self, folder: Path) -> None:
        """See `Disk`."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalWriter:
    def __init__(self, path: Path) -> None:
        self._file = files.create(path)

    def write(self, content: Content) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]  # unbuffered: perhaps not all at once

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
