"""A disk in memory that fills up, flips bits, and loses unfinished files of a process that dies.

Production's `snapshot.write` and `read` use it in place of the machine's own, see `server.snapshots.disk.Disk`. Shards
save during a run, and at its end the newest whole snapshot is read back.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random
from types import TracebackType
from typing import NamedTuple, Self

from torch import Tensor

from polytempo.chaos.world import Violation
from polytempo.core.system.url_path import Place
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots import snapshot
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


class _FaultyDisk:
    """Files by path. All chance comes from `random`."""

    def __init__(self, faults: DiskFaults, random: Random) -> None:
        self.files: dict[Place, bytearray] = {}
        self.dead = False
        self._faults, self._random = faults, random

    def create(self, path: Place) -> _FaultyWriter:
        self._may_fail()
        self.files[path] = bytearray()
        return _FaultyWriter(self, path)

    def read(self, path: Place, most_bytes: int) -> bytes:
        return bytes(self._found(path)[:most_bytes])

    def size(self, path: Place) -> int:
        return len(self._found(path))

    def rename(self, old: Place, new: Place) -> None:
        self._may_fail()
        self.files[new] = self._found(old)
        del self.files[old]

    def remove(self, path: Place) -> None:
        self._may_fail(full=False)
        self._found(path)
        del self.files[path]

    def names(self, folder: Place) -> list[str]:
        return sorted(path.name for path in self.files if path.parent == folder)

    def sync_folder(self, folder: Place) -> None:
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


class _FaultyWriter:
    def __init__(self, disk: _FaultyDisk, path: Place) -> None:
        self._disk, self._path = disk, path

    def write(self, content: Content) -> None:
        self._disk.write(self._path, content)

    def sync(self) -> None:
        """See `Writer`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Writer`."""


_FOLDER = Path("/snapshots")


class ScenarioSaves:
    """The disk, and the weights that should be on it."""

    def __init__(self, faults: DiskFaults, random: Random) -> None:
        self._disk = _FaultyDisk(faults, random)
        self._weights: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def save(self, number: int, shard: Shard) -> None:
        """Write the part of `shard`; a failure is allowed."""
        self._disk.dead = False  # another process
        self._weights[number, shard.number] = shard.index, shard.weights.clone()
        with suppress(snapshot.SnapshotError):
            snapshot.write(_FOLDER, number, shard.number, *shard.dump(), disk=self._disk)

    def check(self, blanks: list[Shard]) -> int | None:
        """Read the newest whole snapshot into `blanks`, one for each shard, and compare them with the saved shards."""
        self._disk.dead = False
        try:
            number = snapshot.newest_whole(_FOLDER, len(blanks), self._disk)
            for shard in blanks if number is not None else ():
                assert number is not None
                part = snapshot.read(_FOLDER, number, shard.number, self._disk)
                shard.load(part.state, part.tensors)
                index, weights = self._weights[number, shard.number]
                if (shard.index, shard.weights.tolist()) != (index, weights.tolist()):
                    raise Violation(f"snapshot {number} of shard {shard.number} differs from the saved weights")
        except (ValueError, snapshot.SnapshotError) as error:
            raise Violation(f"a snapshot was taken for whole and cannot be read: {error}") from error
        return number
