"""`RunColumns`: the records of a run so far, as columns of numbers that curves are drawn from."""

from __future__ import annotations

import math
import time
from array import array
from typing import Any

import msgspec
import numpy as np

from polytempo.core.system.url_path import Place
from polytempo.diagnosis.bound import PARTS
from polytempo.report.pictures.marks import ChartMark, interpolated, mark_of, places
from polytempo.report.status.records import (
    Diagnosis,
    ExchangeRow,
    Logged,
    RunFinished,
    RunStarted,
    StreamRecord,
    TestRow,
    TrainRow,
)
from polytempo.report.status.stream import RunStream
from polytempo.ui.sampling import Numbers, sampled

AXES = ("seconds", "step", "epoch", "samples", "bytes")
"""Quantities that curves are drawn against."""
QUANTITIES = ("loss", "accuracy", "samples_per_s", "idle_share", "staleness", "noise_scale")
"""Quantities of rows that curves show; the user's own numbers follow them."""
_MOST_MARKS, _MOST_OWN, _MOST_RECENT = 100, 32, 240
_AXES_OF_ROWS = AXES[:-1]
_MOST_BYTES = 1 << 20


class RunColumns:
    """The reader of one run. `look` takes the new records; curves and marks are read between two looks.

    Memory: 80 bytes a row.
    """

    def __init__(self, folder: Place) -> None:
        self._stream = RunStream(folder, _MOST_BYTES)
        self._columns: dict[str, dict[str, array[float]]] = {"train": {}, "test": {}, "log": {}}
        self._last_seconds, self._last_step = 0.0, 0
        self.started: RunStarted | None = None
        self.finished: RunFinished | None = None
        self._marks: list[ChartMark] = []
        """The last 100 each of faults, groups, checkpoints and diagnoses."""
        self.logged: list[dict[str, Any]] = []
        """The last texts and pictures that the user's program logged."""
        self.last: dict[str, dict[str, Any]] = {}
        """The last row of each kind."""
        self.workers: dict[int, dict[str, Any]] = {}
        """The last row of each worker with rows of its own."""
        self.parts: dict[str, Any] = {}
        """The parts of a step from the last row that has them."""
        self.exchanged: dict[str, Any] | None = None
        """The last record of exchanges; of several workers the first one's."""
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

    def look(self, within_s: float = math.inf) -> bool:
        """Take the new records, as many as there is time for; True if there are any."""
        until_s, some = time.monotonic() + within_s, False
        while True:
            found = self._stream.look()
            some |= bool(found)
            for record in found:
                self._take(record)
            if not self.behind or time.monotonic() >= until_s:
                return some

    def _take(self, record: StreamRecord) -> None:
        if isinstance(record, TrainRow | TestRow):
            self._row(record)
        elif isinstance(record, RunStarted):
            self.started = record
        elif isinstance(record, RunFinished):
            self.finished = record
        elif isinstance(record, Logged):
            self._own(record)
        elif isinstance(record, ExchangeRow):
            if self.exchanged is None or (record.worker or 0) <= (self.exchanged["worker"] or 0):
                self.exchanged = msgspec.to_builtins(record)
        else:
            if isinstance(record, Diagnosis) and record.about == "slow rank" and len(self.slow) < _MOST_MARKS:
                self.slow[record.who] = record.text
            self._mark(record)

    def _row(self, record: TrainRow | TestRow) -> None:
        """Append a row to the columns of its kind; an entry that a row lacks is NaN there."""
        kind = "train" if isinstance(record, TrainRow) else "test"
        row = {name: getattr(record, name) for name in record.__struct_fields__ if name != "more"}
        row["noise_scale"] = record.more.get("noise_scale")
        if record.seconds is not None:
            self._last_seconds = max(self._last_seconds, record.seconds)
        self._last_step = max(self._last_step, record.step)
        self.num_rows += 1
        self.last[kind] = {name: value for name, value in row.items() if value is not None}
        if isinstance(record, TrainRow):
            self._recent(record)
            parts = {name: record.more.get(name) for name in PARTS}
            if all(map(_is_number, parts.values())):
                self.parts = parts
            if record.worker is not None:
                self.workers[record.worker] = self.last[kind]
        self._append(kind, row)

    def _recent(self, record: TrainRow) -> None:
        worker, end_s = record.worker or 0, record.seconds
        if end_s is None:
            return
        begin_s = next((end for other, _, end, _ in reversed(self.recent) if other == worker), None)
        if begin_s is None or begin_s <= end_s:
            self.recent.append((worker, end_s if begin_s is None else begin_s, end_s, record.idle_share))
        del self.recent[:-_MOST_RECENT]

    def _append(self, kind: str, row: dict[str, Any]) -> None:
        columns = self._columns[kind]
        length = len(columns["step"]) if columns else 0
        for name, value in row.items():
            if type(value) not in (int, float):
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = array("d", [math.nan]) * length
            column.extend([math.nan] * (length - len(column)))
            column.append(value)

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
        self._append("log", {**values, "step": record.step, "seconds": self._last_seconds})

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
        found = np.full(len(columns["step"]), np.nan)
        found[: len(columns[name])] = np.frombuffer(columns[name])
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
