"""The stream of a run: one typed record for each thing that happens, readable while the run goes on.

    metrics.jsonl ── rows ───────────────────────┐
                                                 ├──▶ stream(run), follow(run) ──▶ records
    live.json ────── start, faults, group, end ──┘
    (result.json, where no launcher left a live.json)

Reading a run takes nothing from it: a reader opens files that the run writes anyway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec

from polytempo.core.system.url_path import UrlPath, place
from polytempo.report.status.follower import MetricsFollower
from polytempo.report.status.live_status import (
    GroupStatus,
    LiveStatus,
    ProcessEvent,
    RunState,
    found_status,
    launcher_lives,
)
from polytempo.report.status.metrics import check_row

VERSION = 1
"""Version of the records. It grows when an entry gets another meaning; new entries and new kinds do not change it."""
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="start"):
    """The run's facts. First in a stream, except without a launcher: then they are known at its end."""

    version: int = VERSION
    job: str
    strategy: str
    world: str
    """"process", or "virtual" for a simulation."""
    workers: int
    began_s: _Number | None = None
    """Seconds since 1970; None for a run without a launcher."""
    steps: int | None = None
    """Steps until its end; None: epochs decide."""
    epochs: _Number | None = None


class _Row(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    step: _Count
    """Steps so far, over all workers and earlier parts of the run."""
    loss: _Number | None
    """None: it was not finite."""
    epoch: _Number | None = None
    samples: _Count | None = None
    seconds: _Number | None = None
    """Time spent training so far; virtual in a simulation."""
    more: dict[str, Any] = {}
    """Further entries of the row, such as `noise_scale` and `delays`."""


class TrainRow(_Row, frozen=True, kw_only=True, tag="train"):
    """A row of training: the mean loss and the rate since the row before."""

    samples_per_s: _Number | None = None
    worker: _Count | None = None
    """The row's own worker, with a parameter server."""
    idle_share: _Number | None = None
    """Part of this worker's time that it waited for the server, 0 to 1."""
    staleness: _Number | None = None
    """Updates between reading weights and applying a gradient: the mean since the row before."""


class TestRow(_Row, frozen=True, kw_only=True, tag="test"):
    """An evaluation of the model on the test set."""

    __test__ = False  # pytest takes classes of this name for tests
    accuracy: _Number | None = None


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="finish"):
    """The end of the run, the last record."""

    state: RunState
    """"finished", "preempted" or "failed"."""
    why: str = ""
    """Of a run that failed or was preempted: the first line of its error."""


StreamRecord = RunStarted | TrainRow | TestRow | ProcessEvent | GroupStatus | RunFinished
_ROWS: dict[str, type[TrainRow] | type[TestRow]] = {"train": TrainRow, "test": TestRow}
_ENTRIES = {kind: frozenset(row.__struct_fields__) - {"more"} for kind, row in _ROWS.items()}


def stream(run: str | Path | UrlPath) -> list[StreamRecord]:
    """The records of the run in the folder `run`, or at that URL, so far.

        losses = [record.loss for record in stream("runs/digits-downpour") if isinstance(record, TrainRow)]

    Errors: ValueError if the folder holds no run, or a file in it is not as a run writes it.
    """
    return RunStream(run).look()


def follow(run: str | Path | UrlPath, every_s: float = 1.0) -> Iterator[StreamRecord]:
    """The records of a run so far, then each new one as it comes, until the run has ended.

    It looks every `every_s` seconds. Where the launcher was killed, the iterator ends without `RunFinished`. Errors: as
    in `stream`. Cost: each look reads `live.json` and the new rows; at a URL all rows, if there are new ones.
    """
    source = RunStream(run)
    while True:
        yield from source.look()
        if source.ended:
            return
        time.sleep(every_s)


def record_of(row: dict[str, Any]) -> StreamRecord | None:
    """The record of a row of `metrics.jsonl`; None for a kind that this version does not know. ValueError if broken."""
    check_row(row)
    kind = row.get("kind")
    if not isinstance(kind, str):
        raise ValueError("it has no kind")
    if kind not in _ROWS:
        return None
    known = {name: row[name] for name in row.keys() & (_ENTRIES[kind] | {"kind"})}
    more = {name: value for name, value in row.items() if name not in known}
    return msgspec.convert(known | {"more": more}, _ROWS[kind])


def line_of(record: StreamRecord) -> str:
    """The record as a line of JSON: a row has the entries of its line in `metrics.jsonl`. Nulls are left out."""
    plain = msgspec.to_builtins(record)
    plain |= plain.pop("more", {})
    return json.dumps({name: value for name, value in plain.items() if value is not None})


class RunStream:
    """The place of one reader in the stream of the run `run`. Each `look` gives the records since the last one."""

    def __init__(self, run: str | Path | UrlPath) -> None:
        self._run = place(run)
        self._metrics = self._run / "metrics.jsonl"
        self._rows: list[dict[str, Any]] = []
        self._follower = MetricsFollower(self._metrics, self._rows.append, earlier=True)
        self._started, self._events, self._generation = False, 0, 0
        self.ended = False
        """True if no record will come: the run has ended, or its launcher is gone."""

    def look(self) -> list[StreamRecord]:
        """The new records: rows in the order of their file, then faults, groups and the end."""
        if self.ended:
            return []
        status = found_status(self._run)  # before the rows: a run that has ended has written all its rows
        if status is None and not self._metrics.exists():
            raise ValueError(
                f"{self._run}: this folder holds no metrics.jsonl, live.json or result.json, so it is not a run's, or "
                "of a run that has not begun; name the folder that the run was given as --out"
            )
        self.ended = status is not None and (status.state != "running" or launcher_lives(status) is False)
        records = [] if status is None else self._start(status)
        records += self._new_rows()
        return records if status is None else records + self._news(status)

    def _start(self, status: LiveStatus) -> list[StreamRecord]:
        if self._started:
            return []
        self._started = True
        return [
            RunStarted(
                job=status.job,
                strategy=status.strategy,
                world=status.world,
                workers=status.workers,
                began_s=status.began_s or None,
                steps=status.steps,
                epochs=status.epochs,
            )
        ]

    def _new_rows(self) -> Iterator[StreamRecord]:
        self._rows.clear()
        try:
            self._follower.look(last=True)
            records = [record_of(row) for row in self._rows]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._metrics}: {error}; remove that line to read the others") from error
        return (record for record in records if record is not None)

    def _news(self, status: LiveStatus) -> list[StreamRecord]:
        first = status.num_events - len(status.events)
        begin = max(self._events, first)
        # The consequence of an event may be known later.
        events = list(takewhile(lambda event: event.then or self.ended, status.events[begin - first :]))
        self._events = begin + len(events)
        known = status.groups or (() if status.group is None else (status.group,))  # earlier versions wrote one
        groups = [each for each in known if each.generation > self._generation]
        if groups:
            self._generation = groups[-1].generation
        found: list[StreamRecord] = [*events, *groups]
        return found if status.state == "running" else [*found, RunFinished(state=status.state, why=status.why)]
