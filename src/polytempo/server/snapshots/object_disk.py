"""`ObjectDisk`: the file operations of snapshots where a URL names the folder, and nothing can be renamed.

    create ── write … sync ──▶ a local file without a name     rename ──▶ the whole object, under its last name

What has not been renamed exists only in this process, so a crash leaves nothing of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from polytempo.core.system.url_path import Place, UrlPath
from polytempo.server.snapshots.disk import Content, Disk, LocalDisk, Writer


def disk_of(folder: Place) -> Disk:
    """The disk that `folder` is on."""
    return ObjectDisk() if isinstance(folder, UrlPath) else LocalDisk()


class ObjectDisk:
    """See `Disk`. The temporary folder of this machine must have room for what is being written."""

    def __init__(self) -> None:
        self._written: dict[str, tempfile.TemporaryDirectory[str]] = {}
        """What has not got its last name yet."""

    def create(self, path: Place) -> Writer:
        """See `Disk`."""
        self._drop(path)
        scratch = self._written[str(path)] = tempfile.TemporaryDirectory(prefix="polytempo-part-")
        return _Spool(Path(scratch.name) / "content")

    def read(self, path: Place, most_bytes: int) -> bytes:
        """See `Disk`."""
        return _at(path).read(most_bytes)

    def size(self, path: Place) -> int:
        """See `Disk`."""
        return _at(path).size()

    def rename(self, old: Place, new: Place) -> None:
        """Put what was written as `old` under the name `new`. OSError where fewer bytes arrived."""
        file = Path(self._written[str(old)].name) / "content"
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
            scratch.cleanup()
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
