"""`Disk`: the file operations of snapshots, in a folder or at a URL. A simulated disk can fail at each of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from polytempo.core.system import files
from polytempo.core.system.descriptors import open_descriptor
from polytempo.core.system.scratch_folder import ScratchFolder
from polytempo.core.system.url_path import Place, UrlPath, local_path

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

    def create(self, path: Place) -> Writer:
        """Make a new, empty file, and its folder if there is none. A file of that name is replaced."""

    def read(self, path: Place, most_bytes: int) -> bytes:
        """The file's content, or its first `most_bytes` if it is longer."""

    def size(self, path: Place) -> int:
        """The file's length in bytes."""

    def rename(self, old: Place, new: Place) -> None:
        """Give the file `old` the name `new`. A file `new` is replaced in one step."""

    def remove(self, path: Place) -> None:
        """Remove the file."""

    def names(self, folder: Place) -> list[str]:
        """The names in the folder, sorted; [] where there is no folder."""

    def sync_folder(self, folder: Place) -> None:
        """Flush: when this returns, the folder's names are on the disk."""


class LocalDisk:
    """The machine's own file system. No link is followed (see `core.system.files`)."""

    def create(self, path: Place) -> Writer:
        """See `Disk`."""
        local = local_path(path)
        files.made(local.parent)
        return _LocalWriter(local)

    def read(self, path: Place, most_bytes: int) -> bytes:
        """See `Disk`."""
        return files.read(path, most_bytes)

    def size(self, path: Place) -> int:
        """See `Disk`."""
        with files.opened(local_path(path)) as stream:
            return os.fstat(stream.fileno()).st_size

    def rename(self, old: Place, new: Place) -> None:
        """See `Disk`."""
        os.replace(local_path(old), local_path(new))

    def remove(self, path: Place) -> None:
        """See `Disk`."""
        if not os.path.lexists(local_path(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        files.remove(path)

    def names(self, folder: Place) -> list[str]:
        """See `Disk`."""
        return sorted(os.listdir(files.made(local_path(folder)))) if os.path.lexists(local_path(folder)) else []

    def sync_folder(self, folder: Place) -> None:
        """See `Disk`."""
        descriptor = open_descriptor(local_path(folder), os.O_RDONLY)
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
            rest = rest[self._file.write(rest) :]  # unbuffered: a write may be partial

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def disk_of(folder: Place) -> Disk:
    """The disk that `folder` is on."""
    return ObjectDisk() if isinstance(folder, UrlPath) else LocalDisk()


class ObjectDisk:
    """See `Disk`. The temporary folder of this machine must have room for the files being written."""

    def __init__(self) -> None:
        self._written: dict[str, ScratchFolder] = {}
        """The written files before their renaming."""

    def create(self, path: Place) -> Writer:
        """See `Disk`."""
        self._drop(path)
        scratch = self._written[str(path)] = ScratchFolder()
        return _Spool(scratch.path / "content")

    def read(self, path: Place, most_bytes: int) -> bytes:
        """See `Disk`."""
        return _at(path).read(most_bytes)

    def size(self, path: Place) -> int:
        """See `Disk`."""
        return _at(path).size()

    def rename(self, old: Place, new: Place) -> None:
        """Give the written file `old` the name `new`. OSError where fewer bytes arrived."""
        file = self._written[str(old)].path / "content"
        target = _at(new)
        target.upload(file)
        arrived, sent = target.size(), file.stat().st_size
        if arrived != sent:
            raise OSError(f"{target} has {arrived} bytes, and {sent} were sent")
        self._drop(old)

    def remove(self, path: Place) -> None:
        """See `Disk`."""
        if not self._drop(path):
            _at(path).remove()

    def names(self, folder: Place) -> list[str]:
        """See `Disk`."""
        return _at(folder).names()

    def sync_folder(self, folder: Place) -> None:
        """An object that was put is there."""

    def _drop(self, path: Place) -> bool:
        scratch = self._written.pop(str(path), None)
        if scratch is not None:
            scratch.close()
        return scratch is not None


class _Spool:
    def __init__(self, file: Path) -> None:
        self._stream = file.open("wb")

    def write(self, content: Content) -> None:
        self._stream.write(content)

    def sync(self) -> None:
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


def _at(path: Place) -> UrlPath:
    assert isinstance(path, UrlPath)
    return path
