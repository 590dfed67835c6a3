"""Snapshots under faults: shards save during the run, and at the end the newest whole snapshot is read back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torch import Tensor

from polytempo.chaos.disk import FaultyDisk
from polytempo.chaos.world import Violation
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots import snapshot

_FOLDER = Path("/snapshots")


class ScenarioSaves:
    """The disk, and the weights that should be on it."""

    def __init__(self, disk: FaultyDisk) -> None:
        """No snapshot has been saved."""
        self._disk = disk
        self._weights: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def save(self, number: int, shard: Shard) -> None:
        """Write the part of `shard`; a failure is allowed."""
        self._disk.dead = False  # another process
        self._weights[number, shard.number] = shard.index, shard.weights.clone()
        with suppress(snapshot.SnapshotError):
            snapshot.write(_FOLDER, number, shard.number, *shard.dump(), disk=self._disk)

    def check(self, blanks: list[Shard]) -> int | None:
        """Read the newest whole snapshot into `blanks`, one for each shard; each must be what its shard was."""
        self._disk.dead = False
        try:
            number = snapshot.newest_whole(_FOLDER, len(blanks), self._disk)
            for shard in blanks if number is not None else ():
                assert number is not None
                part = snapshot.read(_FOLDER, number, shard.number, self._disk)
                shard.load(part.state, part.tensors)
                index, weights = self._weights[number, shard.number]
                if (shard.index, shard.weights.tolist()) != (index, weights.tolist()):
                    raise Violation(f"snapshot {number} of shard {shard.number} is not what was saved")
        except (ValueError, snapshot.SnapshotError) as error:
            raise Violation(f"a snapshot was taken for whole and cannot be read: {error}") from error
        return number
