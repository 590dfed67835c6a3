"""A disk in memory that fills up, flips bits, and loses what a process was writing when it died.

Production's `snapshot.write` and `read` use it in place of the machine's own, see `server.shard.disk.Disk`.
"""

from __future__ import annotations

from random import Random
from types import TracebackType
from typing import NamedTuple, Self

from polytempo.core.system.url_path import Place
from polytempo.server.snapshots.disk import Content

_ENOSPC, _EIO = 28, 5


class DiskFaults(NamedTuple):
    """The probability of each fault, at each operation that writes."""

    full: float = 0.0
    """The operation fails once: no space."""
    dies: float = 0.0
    """The process dies here: no operation works until the next snapshot is begun, not even a removal."""
    flips: float = 0.0
    """One written bit is flipped, without an error."""


class FaultyDisk:
    """Files by path. All chance comes from `random`."""

    def __init__(self, faults: DiskFaults, random: Random) -> None:
        """An empty disk."""
        self.files: dict[Place, bytearray] = {}
        self.dead = False
        self._faults, self._random = faults, random

    def create(self, path: Place) -> FaultyWriter:
        """See `Disk`."""
        self._may_fail()
        self.files[path] = bytearray()
        return FaultyWriter(self, path)

    def read(self, path: Place, most_bytes: int) -> bytes:
        """See `Disk`."""
        return bytes(self._found(path)[:most_bytes])

    def size(self, path: Place) -> int:
        """See `Disk`."""
        return len(self._found(path))

    def rename(self, old: Place, new: Place) -> None:
        """See `Disk`."""
        self._may_fail()
        self.files[new] = self._found(old)
        del self.files[old]

    def remove(self, path: Place) -> None:
        """See `Disk`."""
        self._may_fail(full=False)
        self._found(path)
        del self.files[path]

    def names(self, folder: Place) -> list[str]:
        """See `Disk`."""
        return sorted(path.name for path in self.files if path.parent == folder)

    def sync_folder(self, folder: Place) -> None:
        """See `Disk`."""
        self._may_fail()

    def write(self, path: Place, content: Content) -> None:
        """Append to a file, perhaps with a flipped bit."""
        self._may_fail()
        written = bytearray(content)
        if written and self._random.random() < self._faults.flips:
            place = self._random.randrange(len(written))
            written[place] ^= 1 << self._random.randrange(8)
        self.files[path] += written

    def _found(self, path: Place) -> bytearray:
        if path not in self.files:
            raise FileNotFoundError(f"no {path.name} on this disk")
        return self.files[path]

    def _may_fail(self, *, full: bool = True) -> None:
        self.dead = self.dead or self._random.random() < self._faults.dies
        if self.dead:
            raise OSError(_EIO, "the process has died")
        if full and self._random.random() < self._faults.full:
            raise OSError(_ENOSPC, "no space left on this disk")


class FaultyWriter:
    """A file that is being written."""

    def __init__(self, disk: FaultyDisk, path: Place) -> None:
        """Appends to `path`."""
        self._disk, self._path = disk, path

    def write(self, content: Content) -> None:
        """See `Writer`."""
        self._disk.write(self._path, content)

    def sync(self) -> None:
        """See `Writer`."""

    def __enter__(self) -> Self:
        """See `Writer`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Writer`."""
