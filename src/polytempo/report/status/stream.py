"""The stream of a run: one typed record for each thing that happens, readable while the run goes on.

    metrics.jsonl ── rows ───────────────────────┐
                                                 ├──▶ stream(run), follow(run) ──▶ records
    events.jsonl ─── start, faults, group, end ──┘
    (live.json or result.json, where a run of an earlier version left no events.jsonl)

Reading a run takes nothing from it: a reader opens files that the run writes anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from polytempo.core.system.files import EVENTS, METRICS, RESULT, STATUS
from polytempo.core.system.url_path import Place, UrlPath, place
from polytempo.report.runs import as_written, has_result, load_result
from polytempo.report.status.live_status import (
    VERSION,
    LiveStatus,
    StatusNews,
    launcher_lives,
    process_lives,
    read_status,
    status_of_result,
)
from polytempo.report.status.records import RunFinished, RunStarted, StreamRecord, record_of, records_in
from polytempo.report.status.rows import RowFollower, first_rows, last_rows

FILES = (METRICS, EVENTS)


def stream(run: str | Path | UrlPath) -> list[StreamRecord]:
    """The records of the run in the folder `run`, or at that URL, so far.

        losses = [record.loss for record in stream("runs/digits-downpour") if isinstance(record, TrainRow)]

    Errors: ValueError if the folder holds no run, or a file in it is not as a run writes it.
    """
    return RunStream(run).look()


def follow(run: str | Path | UrlPath, every_s: float = 1.0) -> Iterator[StreamRecord]:
    """The records of a run so far, then each new one as it comes, until the run has ended.

    It looks every `every_s` seconds. Where the launcher was killed, the iterator ends without `RunFinished`. Errors: as
    in `stream`. Cost: each look reads the new lines of two files; at a URL all lines, if there are new ones.
    """
    source = RunStream(run)
    while True:
        yield from source.look()
        if source.ended:
            return
        time.sleep(every_s)


def status_in(run: Place) -> LiveStatus | None:
    """The status of the run in a folder: as its launcher wrote it, or else by its stream, or by its result.

    A stream tells it of runs under torchrun and simulations that go on, and of loops with `attach(…, out=…)`. None
    where there is none of them. ValueError for a status or a result that no run has written. Cost: at most 3 MiB are
    read.
    """
    status = read_status(run)
    if status is not None:
        return status
    start, finish = ends_of(run)
    ended = has_result(run)
    if start is not None and not (finish is not None and ended):
        return _status_of_stream(run, start, finish)
    if not ended:
        return None
    result = load_result(run)
    with as_written(run / RESULT, "a run's own facts"):
        return status_of_result(result, last_rows(run))


def _status_of_stream(run: Place, start: RunStarted, finish: RunFinished | None) -> LiveStatus:
    rows = {row.get("kind"): row for row in last_rows(run)}
    grown = [run / name for name in FILES if isinstance(run, Path)]
    changed = [path.stat().st_mtime for path in grown if isinstance(path, Path) and path.is_file()]
    return LiveStatus(
        version=VERSION,
        job=start.job,
        strategy=start.strategy,
        world=start.world,
        workers=start.workers,
        state="running" if finish is None else finish.state,
        written_s=max(changed, default=time.time()),
        began_s=start.began_s or 0.0,
        launcher_host=start.host or "",
        launcher_pid=start.pid or 1,
        why="" if finish is None else finish.why,
        steps=start.steps,
        epochs=start.epochs,
        train=rows.get("train"),
        test=rows.get("test"),
        origin=start.origin,
    )


def ends_of(run: Place) -> tuple[RunStarted | None, RunFinished | None]:
    """The last start of a run among its first and last events, and its end after it. Broken lines are left out."""
    start: RunStarted | None = None
    finish: RunFinished | None = None
    for rows in (first_rows(run, EVENTS), last_rows(run, EVENTS)):
        finish = None  # an end among the first events may be of an earlier part
        for row in rows:
            with suppress(ValueError, RecursionError):
                record = record_of(row)
                if isinstance(record, RunStarted):
                    start, finish = record, None
                elif isinstance(record, RunFinished):
                    finish = record
    return start, finish


class RunStream:
    """The place of one reader in the stream of the run `run`. Each `look` gives the records since the last one.

    most_bytes: a look reads rows of at most so many bytes, so a long run comes in parts, the first of them with all
    records that are not rows. None: all.
    brief: as in `records_in`.
    """

    def __init__(self, run: str | Path | UrlPath, most_bytes: int | None = None, *, brief: bool = False) -> None:
        self._run, self._most_bytes, self._brief = place(run), most_bytes, brief
        self._found: list[StreamRecord] = []
        self._metrics, self._events = map(self._follower, FILES)
        self._news = StatusNews()
        self._unread: list[StreamRecord] = []
        self._last: StreamRecord | None = None
        """The last start or finish."""
        self.ended = False
        """True if no record will come: the run has ended, or its launcher is gone."""

    @property
    def behind(self) -> bool:
        """True if the last look left rows for the next one."""
        return self._metrics.behind

    def look(self) -> list[StreamRecord]:
        """The new records: rows in the order of their file after the last start, then other records."""
        if self.ended and not self.behind and not self._unread:
            return []
        if not (self._run / EVENTS).exists():
            return self._of_status()
        records = self._unread + self._new(self._events)
        self._see(records)
        if not self.ended and isinstance(self._last, RunStarted) and _is_gone(self._last):
            self._see(more := self._new(self._events))  # it may have written its end before it was gone
            records, self.ended = records + more, True
        self._unread = records  # a broken row leaves them for the next look
        rows = self._new(self._metrics)  # after the events: a run that has ended has written all its rows
        self._unread = []
        begin = 1 + max((n for n, each in enumerate(records) if isinstance(each, RunStarted)), default=-1)
        return [*records[:begin], *rows, *records[begin:]]

    def _see(self, records: list[StreamRecord]) -> None:
        self._last = next((e for e in reversed(records) if isinstance(e, RunStarted | RunFinished)), self._last)
        self.ended = isinstance(self._last, RunFinished)

    def _of_status(self) -> list[StreamRecord]:
        """The same for a run from before `events.jsonl`, by its status or its result."""
        status = status_in(self._run)  # before the rows, for the same reason
        if status is None and not (self._run / METRICS).exists():
            raise ValueError(
                f"{self._run}: this folder holds no {EVENTS}, {METRICS}, {STATUS} or {RESULT}, so it "
                "is not a run's, or of a run that has not begun; name the folder that the run was given as --out"
            )
        self.ended = status is not None and (status.state != "running" or launcher_lives(status) is False)
        start = [] if status is None else self._news.start(status)
        rows = self._new(self._metrics)
        return [*start, *rows, *([] if status is None else self._news.look(status))]

    def _follower(self, name: str) -> RowFollower:
        parse = partial(records_in, brief=self._brief)
        return RowFollower(self._run, self._found.append, earlier=True, name=name, parse=parse)

    def _new(self, follower: RowFollower) -> list[StreamRecord]:
        self._found.clear()
        try:
            follower.look(last=True, most_bytes=None if follower is self._events else self._most_bytes)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{follower.path}: {error}; remove that line to read the others") from error
        return self._found.copy()


def _is_gone(start: RunStarted) -> bool:
    return start.host is not None and start.pid is not None and process_lives(start.host, start.pid) is False
