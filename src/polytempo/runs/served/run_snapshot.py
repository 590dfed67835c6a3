"""The launcher's part of a snapshot of a run with a parameter server, and the times of snapshots.

    out/checkpoint/
      snapshot-00000012-shard-0.safetensors, .json      the shards' parts (see `server.shard.snapshot`)
      snapshot-00000012-run.json                        the scheduler, and facts that a resume has in common

The launcher's part is on the disk before the shards begin to write theirs, so a resume with all of theirs finds it.
Each shard writes at its own time. Batches that only some of them have are dealt again after a resume, and these shards
drop them.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from polytempo.core import PolytempoError
from polytempo.core.arithmetic.ranges import Range, Ranges
from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.data.batches import Batches
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.message import Outbox
from polytempo.server.snapshots.disk import disk_of
from polytempo.server.snapshots.score_snapshots import ScorePoints
from polytempo.server.snapshots.snapshot import (
    FORGED,
    SnapshotError,
    complete,
    discard_beyond,
    files_of,
    newest_whole,
    read,
    snapshot_errors,
)
from polytempo.server.snapshots.state import decode

FORMAT = "polytempo-run-snapshot"
VERSION = 1
_LEAST_STEPS = 4
_PATIENCE_S = 30.0
"""A shard that has not written its part by then gets another order: its head may have died with the first."""
_LOOK_AT_URL_S = 0.5
"""The interval of looks at the shards' files, if a look is a request to another host."""
_MAX_BYTES = 64 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NAME = re.compile(r"snapshot-(\d{8,})-run\.json(\.partial)?")


class RunSnapshot(msgspec.Struct, frozen=True, rename={"scheduler": "scheduler"}):
    """The launcher's part of snapshot `number`."""

    number: _Count
    generation: _Count
    """The number of times that the run had been resumed."""
    step: _Count
    """The last step with a row of metrics."""
    facts: dict[str, Any]
    """Facts that a resumed run must have in common: job, strategy, seed, batch size, …"""
    scheduler: str
    """`BatchScheduler.dump` as base64."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    """Seconds of the run so far, on the clock of its rows."""
    callbacks: str = ""
    """The states of the run's callbacks; "": it has none."""


class Resumed(NamedTuple):
    """The snapshot of a resumed run."""

    run_snapshot: RunSnapshot
    scheduler: bytes
    applied: tuple[tuple[Range, ...], ...]
    """The tickets in the part of each shard."""
    indices: tuple[int, ...]
    """The number of log entries before the part of each shard."""

    @property
    def batches(self) -> list[int]:
        """The number of batches in the part of each shard."""
        return [sum(last - first + 1 for first, last in tickets) for tickets in self.applied]

    @property
    def is_one_step(self) -> bool:
        """True if all parts hold the same number of batches."""
        return len(set(self.batches)) == 1

    def scored_again(self, points: ScorePoints, batches: Batches) -> int:
        """The fewest samples of a score that comes again, or for the first time."""
        fewest = min(self.batches)
        stands = points.stands(fewest) and fewest == max(self.batches)
        return batches.samples_before(fewest) + (not stands)


class _File(msgspec.Struct, frozen=True, rename={"run_snapshot": "standing"}):
    format: str
    version: int
    sha256: str
    run_snapshot: msgspec.Raw


def resumed(
    folder: Place, num_shards: int, facts: Mapping[str, Any], numbers_per_batch: int = 1, *, even: bool = False
) -> Resumed:
    """The newest snapshot in `folder` that is whole on every shard; newer, partial ones are removed.

    `numbers_per_batch`: the shards' numbers of a batch; the last number closes it. `even`: batches are dealt evenly,
    so all shards save the same step. A snapshot that was ordered twice, because the run ended or a shard was late, may
    have parts of two steps if the run was killed in between; then the snapshot before is taken, if it has one step.

    Errors: ValueError if there is no snapshot, or its run had other `facts`.
    """
    newest = _newest(folder, num_shards, facts)
    if newest is None:
        if any(name.startswith("step-") for name in disk_of(folder).names(folder)):
            raise ValueError(
                f"{folder} holds checkpoints of workers without a parameter server; resume with the --strategy that "
                "saved them, or check --out"
            )
        raise ValueError(f"there is no whole snapshot in {folder} to resume from; run without --resume, or check --out")
    chosen = _with_parts(folder, num_shards, newest, numbers_per_batch)
    if even and not chosen.is_one_step:
        older = _newest(folder, num_shards, facts, before=newest.number)
        before = None if older is None else _with_parts(folder, num_shards, older, numbers_per_batch)
        chosen = before if before is not None and before.is_one_step else chosen
    _set_aside(folder, num_shards, chosen.run_snapshot.number)
    discard_beyond(folder, chosen.run_snapshot.number)
    return chosen


def _set_aside(folder: Place, num_shards: int, last: int) -> None:
    """Rename the files of whole snapshots after `last`, which are damaged, if they can be renamed, and name them."""
    numbers = {int(match[1]) for name in disk_of(folder).names(folder) if (match := _NAME.fullmatch(name))}
    for number in sorted(each for each in numbers if each > last and complete(folder, each, num_shards)):
        harmed = [run_snapshot_path(folder, number), *files_of(folder, number, num_shards)]
        for path in harmed if isinstance(folder, Path) else []:
            with suppress(OSError):
                disk_of(folder).rename(path, path.with_name(f"{path.name}.damaged"))
        print(f"note: snapshot {number} in {folder} is damaged and set aside", file=sys.stderr)


def _with_parts(folder: Place, num_shards: int, run_snapshot: RunSnapshot, numbers_per_batch: int) -> Resumed:
    """The snapshot with the launcher's part `run_snapshot`, and facts from the shards' parts."""
    states = []
    for shard in range(num_shards):
        part = read(folder, run_snapshot.number, shard)
        with snapshot_errors(folder, run_snapshot.number, shard):
            tensor = part.tensors[0]
            states.append(decode(part.state, part.tensors, tensor.numel(), tensor.dtype, lambda given: given))
    numbers = [Ranges((*state.tickets, *state.dropped_tickets)) for state in states]  # neither is dealt again
    applied = tuple(_closed(each, numbers_per_batch) for each in numbers)
    return Resumed(run_snapshot, b64decode(run_snapshot.scheduler), applied, tuple(state.index for state in states))


def go_on(scheduler: BatchScheduler, found: Resumed, folder: Place) -> None:
    """Let `scheduler` deal the remaining batches."""
    try:
        scheduler.load(found.scheduler, found.applied)
    except FORGED as error:
        path = run_snapshot_path(folder, found.run_snapshot.number)
        raise SnapshotError(f"{path} does not fit this run: {error}") from error


def _closed(numbers: Ranges, numbers_per_batch: int) -> tuple[Range, ...]:
    """The batches that have their last number among `numbers`."""
    closed = Ranges()
    for first, last in numbers:
        begin, end = first // numbers_per_batch, (last + 1) // numbers_per_batch
        if begin < end:
            closed.add(begin, end - 1)
    return closed.tuples


def _newest(
    folder: Place, num_shards: int, facts: Mapping[str, Any], *, before: int | None = None
) -> RunSnapshot | None:
    names = disk_of(folder).names(folder)
    numbers = sorted((int(m[1]) for name in names if (m := _NAME.fullmatch(name)) and not m[2]), reverse=True)
    for number in numbers[:1]:
        with suppress(SnapshotError):
            _check(read_run_snapshot(folder, number), facts)  # before the number of shards matters
    while (found := newest_whole(folder, num_shards, before=before)) is not None:
        try:
            run_snapshot = read_run_snapshot(folder, found)
        except SnapshotError:
            before = found
            continue
        _check(run_snapshot, facts)
        return run_snapshot
    return None


def _check(run_snapshot: RunSnapshot, facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        saved = run_snapshot.facts.get(name)
        if saved != value:
            what = name.replace("_", " ")
            raise ValueError(
                f"the saved run had {what} {saved!r}, and this one has {value!r}; resume with the saved {what}, or "
                "begin another run in another folder"
            )


def discard(folder: Place) -> None:
    """Remove every snapshot of an earlier run in `folder`."""
    discard_beyond(folder, None)
    for name in disk_of(folder).names(folder):
        if _NAME.fullmatch(name):
            disk_of(folder).remove(folder / name)


def run_snapshot_path(folder: Place, number: int) -> Place:
    """The launcher's part of snapshot `number`."""
    return folder / f"snapshot-{number:08d}-run.json"


def read_run_snapshot(folder: Place, number: int) -> RunSnapshot:
    """Read and check it; SnapshotError names a file that is missing or damaged."""
    path = run_snapshot_path(folder, number)
    try:
        file = msgspec.json.decode(disk_of(path).read(path, _MAX_BYTES), type=_File)
        if (file.format, file.version) != (FORMAT, VERSION):
            raise SnapshotError(f"{path} is {file.format!r} version {file.version}; this program reads {VERSION}")
        if hashlib.sha256(file.run_snapshot).hexdigest() != file.sha256:
            raise SnapshotError(f"{path} is damaged; resume from an earlier snapshot")
        found = msgspec.json.decode(file.run_snapshot, type=RunSnapshot)
        if found.number != number:
            raise SnapshotError(f"{path} says that it is of snapshot {found.number}; resume from an earlier snapshot")
        return found
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise SnapshotError(f"{path} cannot be read ({error}); resume from an earlier snapshot") from error


def write_run_snapshot(folder: Place, run_snapshot: RunSnapshot) -> None:
    """Write the part, complete or not at all; it is on the disk when this returns."""
    disk, path = disk_of(folder), run_snapshot_path(folder, run_snapshot.number)
    body = msgspec.json.encode(run_snapshot)
    partial = path.with_name(path.name + ".partial")
    with disk.create(partial) as writer:
        writer.write(msgspec.json.encode(_File(FORMAT, VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))))
        writer.sync()
    disk.rename(partial, path)
    disk.sync_folder(folder)


class SnapshotSaves:
    """Orders a run's snapshots, one at a time; a snapshot that does not get ready is ordered once more.

    `every`: steps between snapshots; None: at the end of each epoch, at least four steps apart. In any case at the end.
    `step()` is the last step with a row; `on_order` is called before each order, and `on_saved` with the launcher's
    part of each snapshot that is whole on all shards.
    """

    def __init__(
        self,
        folder: Place,
        coordinator: Coordinator,
        facts: Mapping[str, Any],
        *,
        workers: int,
        every: int | None,
        last: RunSnapshot | None,
        step: Callable[[], int],
        on_order: Callable[[], None],
        on_saved: Callable[[RunSnapshot], None],
        callbacks: Callable[[], str] = str,
    ) -> None:
        self._folder, self._coordinator, self._facts = folder, coordinator, dict(facts)
        self._workers, self._every = workers, every
        self._number, self._generation = (0, 0) if last is None else (last.number, last.generation + 1)
        self._step, self._on_order, self._on_saved, self._callbacks = step, on_order, on_saved, callbacks
        self._under_way: RunSnapshot | None = None
        self._seconds = 0.0 if last is None else last.seconds
        self._ordered_s: float | None = None
        self._saved_steps, self._saved_epoch = self._steps, coordinator.scheduler.epoch
        self._ended = self._leaves = self._wanted = False
        self._look_at_s = 0.0

    @property
    def pending(self) -> bool:
        """True if a snapshot is under way."""
        if time.monotonic() < self._look_at_s:
            return self._ordered_s is not None
        if self._ordered_s is not None and isinstance(self._folder, UrlPath):
            self._look_at_s = time.monotonic() + _LOOK_AT_URL_S
        if self._ordered_s is not None and complete(self._folder, self._number, len(self._coordinator.chains)):
            self._ordered_s = None
            assert self._under_way is not None
            self._on_saved(self._under_way)
            for name in disk_of(self._folder).names(self._folder):
                match = _NAME.fullmatch(name)
                if match and int(match[1]) < self._number - 1:
                    with suppress(OSError):  # an old file that cannot be removed does no harm
                        disk_of(self._folder).remove(self._folder / name)
        return self._ordered_s is not None

    def leave(self, now_s: float) -> Outbox:
        """Order a last snapshot, because the run ends early; `left` is True when all have written it."""
        if self._leaves or self.pending:
            return []
        self._leaves = True
        return self._order(now_s)

    @property
    def left(self) -> bool:
        """True if the last snapshot is whole."""
        return self._leaves and not self.pending

    def want(self) -> None:
        """Order a snapshot at the next look, or when the one under way is whole."""
        self._wanted = True

    def look(self, now_s: float) -> Outbox:
        """Order a snapshot, if the interval is over or one is wanted."""
        if self._coordinator.scheduler.finished:
            if self._ended:
                return []
            self._ended = True
            return self._order(now_s)
        if self.pending:
            assert self._ordered_s is not None
            return self._order(now_s) if now_s - self._ordered_s > _PATIENCE_S else []
        return self._order(now_s) if self._is_due else []

    @property
    def _steps(self) -> int:
        return sum(last - first + 1 for first, last in self._coordinator.scheduler.done) // self._workers

    @property
    def _is_due(self) -> bool:
        if self._wanted:
            return True
        steps = self._steps - self._saved_steps
        if self._every is not None:
            return steps >= self._every
        return self._coordinator.scheduler.epoch > self._saved_epoch and steps >= _LEAST_STEPS

    def _order(self, now_s: float) -> Outbox:
        """Order number n + 1 when every shard has n; else n again, because a resume would need n - 1 then."""
        if not self.pending:
            self._number += 1
            self._wanted = False
        self._ordered_s = now_s
        scheduler = self._coordinator.scheduler
        self._saved_steps, self._saved_epoch = self._steps, scheduler.epoch
        self._on_order()
        self._under_way = self.write(self._number, now_s)
        return self._coordinator.save(now_s, self._number)

    def write(self, number: int, now_s: float) -> RunSnapshot:
        """Write and return the launcher's part of snapshot `number`, with the present state."""
        dump = b64encode(self._coordinator.scheduler.dump()).decode()
        seconds = self._seconds + now_s - self._coordinator.began_s
        run_snapshot = RunSnapshot(
            number, self._generation, self._step(), self._facts, dump, seconds, self._callbacks()
        )
        try:
            write_run_snapshot(self._folder, run_snapshot)
        except OSError as error:
            raise PolytempoError(
                f"cannot write to {self._folder}: {files.problem(error, self._folder)}, then resume from the last "
                "snapshot"
            ) from error
        return run_snapshot

    def discard(self, number: int) -> None:
        """Remove the shards' parts of snapshot `number`, if there are any."""
        with suppress(OSError):  # it is tried again
            names = disk_of(self._folder).names(self._folder)
            if any(name.startswith(f"snapshot-{number:08d}-shard-") for name in names):
                discard_beyond(self._folder, number - 1)

    def remove(self, number: int) -> None:
        """Remove the launcher's part of snapshot `number`."""
        with suppress(OSError):  # without the shards' parts it does no harm
            disk_of(self._folder).remove(run_snapshot_path(self._folder, number))
