"""`RunColumns`: the records of a run so far, as columns of numbers that curves are drawn from."""

from __future__ import annotations

import math
import time
from array import array
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from polytempo.core.system.url_path import Place
from polytempo.diagnosis.bound import PARTS
from polytempo.report.pictures.marks import ChartMark, interpolated, mark_of, places
from polytempo.report.status.client_rounds import ROUND, ClientRounds
from polytempo.report.status.records import (
    Diagnosis,
    ExchangeRow,
    Logged,
    LoggedText,
    RunFinished,
    RunStarted,
    StreamRecord,
    TestRow,
    TrainRow,
)
from polytempo.report.status.stream import RunStream
from polytempo.ui.of_run.sampling import Numbers, sampled

AXES = ("seconds", "step", "epoch", "samples", "bytes")
"""Quantities that curves are drawn against."""
QUANTITIES = ("loss", "accuracy", "samples_per_s", "idle_share", "staleness", "noise_scale", "lr")
"""Quantities of rows that curves show; the user's own numbers follow them."""
_MOST_MARKS, _MOST_OWN, _MOST_RECENT = 100, 32, 240
_AXES_OF_ROWS = AXES[:-1]
_MOST_BYTES = 1 << 20
_Row = TrainRow | TestRow


class RunColumns:
    """The reader of one run. `look` takes the new records; curves and marks are read between two looks.

    Memory: 80 bytes a row, and 88 of a job with a schedule.
    """

    def __init__(self, folder: Place) -> None:
        self._stream = RunStream(folder, _MOST_BYTES, brief=True)
        self._columns: dict[str, dict[str, array[float]]] = {"train": {}, "test": {}, "log": {}}
        self._last_seconds, self._last_step = 0.0, 0
        self.started: RunStarted | None = None
        self.finished: RunFinished | None = None
        self._marks: list[ChartMark] = []
        """The last 100 each of faults, groups, checkpoints and diagnoses."""
        self.logged: list[dict[str, Any]] = []
        """The last texts and pictures that the user's program logged."""
        self.client_rounds = ClientRounds()
        """The turns of clients in rounds."""
        self._last: dict[str, _Row] = {}
        self._of_workers: dict[int, TrainRow] = {}
        self.parts: dict[str, Any] = {}
        """The parts of a step from the last row that has them."""
        self._exchanged: ExchangeRow | None = None
        self.slow: dict[str, str] = {}
        """The last diagnosis of each slow rank, or worker, by its name."""
        self.recent: list[tuple[int, float, float, float | None]] = []
        """The last rows of training: worker, begin and end in seconds of training, and the part that it waited."""
        self.num_rows = 0

    @property
    def ended(self) -> bool:
        """True if no record will come."""
        return self._stream.ended

    @property
    def behind(self) -> bool:
        """True if the last look left rows for the next one."""
        return self._stream.behind

    @property
    def last(self) -> dict[str, dict[str, Any]]:
        """The last row of each kind."""
        return {kind: _known(row) for kind, row in self._last.items()}

    @property
    def workers(self) -> dict[int, dict[str, Any]]:
        """The last row of each worker with rows of its own."""
        return {worker: _known(row) for worker, row in self._of_workers.items()}

    @property
    def exchanged(self) -> dict[str, Any] | None:
        """The last record of exchanges; of several workers the first one's."""
        found: dict[str, Any] | None = msgspec.to_builtins(self._exchanged)
        return found

    def look(self, within_s: float = math.inf) -> bool:
        """Take the new records, as many as there is time for; True if there are any."""
        until_s, some = time.monotonic() + within_s, False
        while True:
            found = self._stream.look()
            some |= bool(found)
            self._take_all(found)
            if not self.behind or time.monotonic() >= until_s:
                return some

    def _take_all(self, records: list[StreamRecord]) -> None:
        """Take records; the rows between two others as one table, which is faster than one by one."""
        rows: list[_Row] = []
        for record in records:
            if isinstance(record, TrainRow | TestRow):
                rows.append(record)
            elif isinstance(record, ExchangeRow):
                if self._exchanged is None or (record.worker or 0) <= (self._exchanged.worker or 0):
                    self._exchanged = record
            else:
                self._rows(rows)
                rows = []
                self._take(record)
        self._rows(rows)

    def _take(self, record: StreamRecord) -> None:
        if isinstance(record, RunStarted):
            self.started = record
        elif isinstance(record, RunFinished):
            self.finished = record
        elif isinstance(record, Logged):
            self._own(record)
        elif isinstance(record, LoggedText) and record.name == ROUND:
            self.client_rounds.add(record.text)
        else:
            if isinstance(record, Diagnosis) and record.about == "slow rank" and len(self.slow) < _MOST_MARKS:
                self.slow[record.who] = record.text
            self._mark(record)

    def _rows(self, rows: list[_Row]) -> None:
        """Append rows to the columns of their kinds; an entry that a row lacks is NaN there."""
        if not rows:
            return
        trained = [row for row in rows if isinstance(row, TrainRow)]
        tested = [row for row in rows if isinstance(row, TestRow)]
        self._last_seconds = max(self._last_seconds, *(row.seconds for row in rows if row.seconds is not None), 0.0)
        self._last_step = max(self._last_step, *(row.step for row in rows))
        self.num_rows += len(rows)
        for kind, some in (("train", trained), ("test", tested)):
            if some:
                self._last[kind] = some[-1]
                entries = {name: list(map(attrgetter(name), some)) for name in _entries(some[0])}
                self._append(kind, entries | {"noise_scale": [row.more.get("noise_scale") for row in some]})
        self._of_workers |= {row.worker: row for row in trained if row.worker is not None}
        for row in trained:
            if row.more and all(_is_number(row.more.get(name)) for name in PARTS):
                self.parts = {name: row.more[name] for name in PARTS}
        for row in trained[-_MOST_RECENT:]:
            self._recent(row)

    def _recent(self, record: TrainRow) -> None:
        worker, end_s = record.worker or 0, record.seconds
        if end_s is None:
            return
        begin_s = next((end for other, _, end, _ in reversed(self.recent) if other == worker), None)
        if begin_s is None or begin_s <= end_s:
            self.recent.append((worker, end_s if begin_s is None else begin_s, end_s, record.idle_share))
        del self.recent[:-_MOST_RECENT]

    def _append(self, kind: str, entries: dict[str, list[Any]]) -> None:
        """Append values to columns, equally many to each; None stands for NaN."""
        columns = self._columns[kind]
        length = len(columns["step"]) if columns else 0
        for name, values in entries.items():
            if values.count(None) == len(values):
                continue
            column = columns.setdefault(name, array("d"))
            column.extend([math.nan] * (length - len(column)))
            column.frombytes(np.array(values, dtype=np.float64).tobytes())

    def _mark(self, record: StreamRecord) -> None:
        mark = mark_of(record)
        if mark is None:
            self.logged = [*self.logged, {"at_s": self._last_seconds, **msgspec.to_builtins(record)}][-_MOST_OWN:]
            return
        self._marks.append(mark)
        alike = [number for number, each in enumerate(self._marks) if each.kind == mark.kind]
        if len(alike) > _MOST_MARKS:  # a checkpoint every second leaves the faults in place
            del self._marks[alike[0]]

    def marks(self, axis: str, sent_bytes: float | None = None) -> list[dict[str, Any]]:
        """The marks with `kind`, `text`, `step`, `at_s`, and `x`: the place on an axis. None: it is not known."""
        columns = self._columns["train"] or self._columns["test"]
        named = {name: self._axis(columns, name, sent_bytes) for name in {axis, "step", "seconds"}}
        known = {name: values for name, values in named.items() if values is not None}
        at = {name: places(self._marks, name, known) for name in named}
        return [
            {
                "kind": mark.kind,
                "text": mark.text,
                "x": at[axis][number],
                "step": at["step"][number] if mark.step is None else mark.step,
                "at_s": at["seconds"][number] if mark.at_s is None else mark.at_s,
            }
            for number, mark in enumerate(self._marks)
        ]

    def _own(self, record: Logged) -> None:
        """The user's own numbers, as quantities of their own."""
        known = self._columns["log"]
        room = _MOST_OWN - len(known)
        new = [name for name in record.values if name not in known][: max(0, room)]
        values = {name: value for name, value in record.values.items() if name in known or name in new}
        self._append(
            "log",
            {name: [value] for name, value in values.items()}
            | {"step": [record.step], "seconds": [self._last_seconds]},
        )

    def quantities(self) -> list[str]:
        """The quantities that have a point."""
        rows = [name for name in QUANTITIES if any(name in self._columns[kind] for kind in ("train", "test"))]
        return rows + [name for name in self._columns["log"] if name not in {*_AXES_OF_ROWS, *rows}]

    def axes(self, sent_bytes: float | None) -> list[str]:
        """The axes that rows can be drawn against; bytes where the run's total is known."""
        columns = self._columns["train"] or self._columns["test"]
        found = [name for name in _AXES_OF_ROWS if name in columns]
        return [*found, "bytes"] if sent_bytes and found else found

    def curves(
        self,
        axis: str,
        quantity: str,
        num_pixels: int,
        span: tuple[float | None, float | None] = (None, None),
        sent_bytes: float | None = None,
    ) -> list[dict[str, Any]]:
        """The curves of a quantity: of training, of tests, and of the user's own numbers, each where it has points."""
        found = []
        for kind, columns in self._columns.items():
            y = self._filled(columns, quantity)
            x = self._axis_of_own(axis) if kind == "log" else None
            x = self._axis(columns, axis, sent_bytes) if x is None else x
            if y is None or x is None or quantity == axis:
                continue
            curve = sampled(x, y, num_pixels, *span)
            if len(curve.x):
                found.append({"kind": kind, **curve.plain()})
        return found

    def _axis_of_own(self, axis: str) -> Numbers | None:
        """The axis of the user's own numbers, by steps between rows: a record has its step alone."""
        rows = self._columns["train"] or self._columns["test"]
        by, values, steps = (
            self._filled(rows, "step"),
            self._filled(rows, axis),
            self._filled(self._columns["log"], "step"),
        )
        if axis == "step" or by is None or values is None or steps is None:
            return None
        found: Numbers | None = interpolated(steps, by, values)
        return found

    def _axis(self, columns: dict[str, array[float]], axis: str, sent_bytes: float | None) -> Numbers | None:
        """The column of an axis. Bytes grow with the steps: a run records their sum at its end."""
        if axis != "bytes":
            return self._filled(columns, axis)
        steps = self._filled(columns, "step")
        if steps is None or not sent_bytes:
            return None
        scaled: Numbers = steps * (sent_bytes / max(1, self._last_step))
        return scaled

    def _filled(self, columns: dict[str, array[float]], name: str) -> Numbers | None:
        """A column as numbers, one for each step."""
        if name not in columns:
            return None
        found = np.array(columns[name])
        lacks = len(columns["step"]) - len(found)
        return np.pad(found, (0, lacks), constant_values=np.nan) if lacks else found


def _entries(row: _Row) -> tuple[str, ...]:
    return tuple(name for name in row.__struct_fields__ if name != "more")


def _known(row: _Row) -> dict[str, Any]:
    """The entries of a row that have values, and its noise scale."""
    found = {name: getattr(row, name) for name in _entries(row)} | {"noise_scale": row.more.get("noise_scale")}
    return {name: value for name, value in found.items() if value is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
