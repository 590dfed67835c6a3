"""`Disk`: the file operations that snapshots use, so that a simulated disk can fail at each of them."""

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
        """Append all of `content`. OSError where the disk is full."""

    def sync(self) -> None:
        """Flush: when this returns, the written bytes are on the disk."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Disk(Protocol):
    """Files in folders. An operation that fails raises OSError."""

    def create(self, path: Path) -> Writer:
        """Make a new, empty file, and its folder if there is none. A file of that name is replaced."""

    def read(self, path: Path, most_bytes: int) -> bytes:
        """The file's content, or its first `most_bytes` if it is longer."""

    def size(self, path: Path) -> int:
        """The file's length in bytes."""

    def rename(self, old: Path, new: Path) -> None:
        """Give the file `old` the name `new`. A file `new` is replaced in one step."""

    def remove(self, path: Path) -> None:
        """Remove the file."""

    def names(self, folder: Path) -> list[str]:
        """The names in the folder, sorted; [] where there is no folder."""

    def sync_folder(self, folder: Path) -> None:
        """Flush: when this returns, the folder's names are on the disk."""


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
