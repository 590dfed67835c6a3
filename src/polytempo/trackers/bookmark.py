"""`Bookmark`: the place of a tracker in a run's stream, in the run's folder, so that a resumed run goes on there."""

from __future__ import annotations

import secrets

import msgspec

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.report.status.records import (
    CheckpointSaved,
    ExchangeRow,
    Logged,
    LoggedImage,
    LoggedText,
    RunFinished,
    RunStarted,
    StreamRecord,
    TestRow,
    TrainRow,
)

_MOST_BYTES = 1 << 20


class _Written(msgspec.Struct):
    identity: str
    steps: dict[str, int] = {}
    """The last step of each kind of row and worker."""
    given: dict[str, int] = {}
    """Number of records of that step: `pt.log` may be called several times in one."""
    events: int = 0
    """Number of other records."""


class Bookmark:
    """The records that a tracker has been given. A resumed run writes some of them again; these are not new.

    So a tracked run has one row for each step, the first. By law 3 (see ARCHITECTURE.md) the second has the same loss,
    unless the strategy is asynchronous.
    """

    def __init__(self, path: Place, written: _Written) -> None:
        self._path, self._written = path, written
        self._before, self._rest, self._skipped = dict(written.steps), dict(written.given), written.events

    @classmethod
    def of(cls, folder: Place, name: str, *, fresh: bool) -> Bookmark:
        """The bookmark of the tracker `name` in `folder`; a new one if there is none, or if the run is `fresh`."""
        path = folder / "trackers" / f"{name}.json"
        files.made(folder / "trackers")
        try:
            written = None if fresh else msgspec.json.decode(files.read(path, _MOST_BYTES), type=_Written)
        except (OSError, ValueError):
            written = None
        return cls(path, written or _Written(secrets.token_hex(4)))

    @property
    def identity(self) -> str:
        """A name that no other run of this tracker has."""
        return self._written.identity

    def is_new(self, record: StreamRecord) -> bool:
        """True for a record that the tracker has not been given before; it counts as given now."""
        if isinstance(record, RunStarted | RunFinished):  # the next part writes records of the last steps again
            self._before, self._rest = dict(self._written.steps), dict(self._written.given)
            return False
        if isinstance(record, TrainRow | TestRow | ExchangeRow | CheckpointSaved | Logged | LoggedText | LoggedImage):
            key = f"{record.__struct_config__.tag}/{getattr(record, 'worker', None)}"
            again = isinstance(record, Logged | LoggedText | LoggedImage)
            steps = self._before if again else self._written.steps
            new = record.step > steps.get(key, -1)
            if again and record.step == steps.get(key):
                self._rest[key] = self._rest.get(key, 0) - 1
                new = self._rest[key] < 0
            last = self._written.steps.get(key, -1)
            if new and record.step >= last:
                self._written.steps[key] = record.step
                self._written.given[key] = 1 + (self._written.given.get(key, 0) if record.step == last else 0)
            return new
        if self._skipped:
            self._skipped -= 1
            return False
        self._written.events += 1
        return True

    @property
    def place(self) -> bytes:
        """The present place."""
        return msgspec.json.encode(self._written)

    def write(self, place: bytes | None = None) -> None:
        """Keep this place, or the present one."""
        files.replace(self._path, self.place if place is None else place)
