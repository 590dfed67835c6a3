"""`DurableLines`: lines that are on the disk, or at a URL, before `append` returns: facts that must not be lost.

runs/sites/noise.jsonl                            a file; a synchronous write appends
s3://bucket/sites/noise.jsonl, noise.jsonl.1, …   parts; the last one is put again with each line, until it is full
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from polytempo.core.system import files
from polytempo.core.system.descriptors import open_descriptor
from polytempo.core.system.url_path import Place, UrlPath

PART_BYTES = 1 << 14
"""The size of a part that gets no further line: an append puts less than this and a line."""
_CLOSED = os.O_CLOEXEC | os.O_NOFOLLOW


class DurableLines:
    """The lines of `path`, of one process. Only their owner can read a file.

        lines = DurableLines(folder / "noise.jsonl")
        lines.append(b'[3, [17, 4]]')       # now clients 17 and 4 may be asked

    Errors: OSError, and then a line may be there or not. Cost: a synchronous write an append; at a URL an object of
    `PART_BYTES` at most and a line, so n lines cost O(n) bytes.
    """

    def __init__(self, path: Place, most_bytes: int = 1 << 30) -> None:
        """`most_bytes`: the most that is read."""
        self._path, self._most_bytes = path, most_bytes
        self._number, self._last = -1, b""
        """At a URL: the last part and its content; -1: it is to be found."""

    def read(self) -> list[bytes]:
        """All lines; none where there is no file. The end of a line that was being written is cut off."""
        if isinstance(self._path, UrlPath):
            found = self._parts(self._path)
            self._number, self._last = max(0, len(found) - 1), found[-1] if found else b""
            return b"".join(found).splitlines()
        try:
            content = files.read(self._path, self._most_bytes)
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        return whole.splitlines()

    def replace(self, lines: Iterable[bytes]) -> None:
        """Put other lines in place of all. A process that dies meanwhile leaves the old ones, or at a URL their
        first parts."""
        content = b"".join(each + b"\n" for each in lines)
        if isinstance(self._path, UrlPath):
            for number in reversed(range(len(self._parts(self._path)))):
                _part(self._path, number).remove()
            self._path.write(content)
            self._number, self._last = 0, content
            return
        aside = self._path.with_name(self._path.name + ".tmp")
        aside.unlink(missing_ok=True)
        _write(aside, os.O_EXCL, content)
        aside.replace(self._path)
        _sync_folder(self._path.parent)

    def append(self, line: bytes) -> None:
        """Add a line; it is there when this returns."""
        if not isinstance(self._path, UrlPath):
            _write(self._path, os.O_APPEND, line + b"\n")
            return
        if self._number < 0:
            self.read()
        full = len(self._last) >= PART_BYTES
        number, content = self._number + full, (b"" if full else self._last) + line + b"\n"
        _part(self._path, number).write(content)
        self._number, self._last = number, content

    def _parts(self, path: UrlPath) -> list[bytes]:
        """All parts, which have numbers without a gap."""
        found, room = list[bytes](), self._most_bytes
        try:
            while room > 0:
                found.append(_part(path, len(found)).read(room))
                room -= len(found[-1])
        except FileNotFoundError:
            pass
        return found


def _part(path: UrlPath, number: int) -> UrlPath:
    return path.with_name(f"{path.name}.{number}") if number else path


def _write(path: Path, flags: int, content: bytes) -> None:
    """Write at the end of a file, which is made where it is not there, down to the disk. After an error the file has
    its former size: half of a line would spoil the next one."""
    made = not os.path.lexists(path)
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | flags | _CLOSED, 0o600)
    with open(descriptor, "wb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            files.write(stream, content, path)
            os.fsync(stream.fileno())
        except OSError:
            with suppress(OSError):
                os.ftruncate(stream.fileno(), size)
            raise
    if made:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = open_descriptor(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
